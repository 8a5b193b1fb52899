"""Log files: framed records, appending to files, and actions that wait until records are durable. What the
records mean is up to their owners."""
