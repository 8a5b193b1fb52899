"""Formation of rings from workers: the probe's queue, the joint chooser, and regrouping as speeds drift.

Pure: the caller passes a score function for groupings; nothing here knows costs.
"""
