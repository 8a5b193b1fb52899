"""The loss-tolerant transport's decisions: what is sent when, what is given up, and why (S3)."""
