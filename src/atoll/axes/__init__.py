"""The axes along which a way of training is chosen, and the table of what cannot be chosen together.

Here stand the cells (`cells.py`), the table of needs (`needs.py`), and the protocol of a codec. The protocols
of the other axes stand where their implementations do (docs/architecture.md). Torch appears in annotations
only, so that the command line may read the table.
"""
