"""Which workers share a ring: the probe's queue, the joint chooser, and regrouping as speeds drift.

Pure: what a grouping gives is a score function that the caller passes in; nothing here knows costs.
"""
