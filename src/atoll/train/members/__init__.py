"""Workers that join, leave, meet and move."""
