"""The axes along which a way of training is chosen, and the table of what cannot be chosen together.

Here stand frozen values, protocols, and the table of needs (`needs.py`). Implementations of the protocols
live in the layers above. Torch appears in annotations only, so that the command line may read the table.
"""
