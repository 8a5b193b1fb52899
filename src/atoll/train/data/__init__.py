"""Samplers: which worker trains on which samples."""
