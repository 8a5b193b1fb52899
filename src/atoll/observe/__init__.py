"""Records and displays of a run: journals, merged metrics, the live display, the summary, the picture.

Everything here subscribes to core's events or reads their records. Nothing here imports torch.
"""
