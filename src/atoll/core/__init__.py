"""Ids, units, errors, configuration and events: what every layer above may use.

Imports the standard library, msgspec and numpy, and nothing else.
"""
