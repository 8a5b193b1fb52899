"""What is kept and shown of a run: journals, the merged metrics, the live display, the summary, the picture.

Everything here subscribes to core's events or reads what they left. Nothing here imports torch.
"""
