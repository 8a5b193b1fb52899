"""Collectives of a group of workers that survive the loss of a member."""
