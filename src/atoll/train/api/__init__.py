"""What scripts call: the session, what it is built from, and what it tells of the run."""
