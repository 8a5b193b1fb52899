"""The interface to scripts: the session, the objects that it is built from, and its records of the run."""
