"""Samplers: they decide which worker trains on which samples."""
