"""Units, errors, configuration, events and helpers, for every layer above.

Imports the standard library, msgspec and numpy, and nothing else.
"""
