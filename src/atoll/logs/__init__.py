"""How logs are kept: framed, appended to files, and waited for. What is in them is their owners' matter."""
