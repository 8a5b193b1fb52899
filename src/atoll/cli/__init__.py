"""The command line; thin, and imported by nobody."""
