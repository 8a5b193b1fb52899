"""What tests and benchmarks share: tiny models and plain-PyTorch references (`models`, `families`, `parity`),
a pool of worker processes (`pool`, `runs`, `served`), processes that are killed (`supervisor`), a virtual
network (`sim`, `ltp`). It lies outside of `atoll`, and no user installs it.
"""
