"""Decisions of the loss-tolerant transport: when to send, what to give up, and why. No sockets, no clocks.

The idea is LTP's: Chen et al., "Boosting Distributed Machine Learning Training Through Loss-tolerant
Transmission Protocol", arXiv 2305.04279. docs/ltp.md and docs/ltp-rates.md describe the protocol and its
rates.
"""
