"""The loss-tolerant transport's decisions: what is sent when, what is given up, and why.

The idea is LTP's: Chen et al., "Boosting Distributed Machine Learning Training Through Loss-tolerant
Transmission Protocol", arXiv 2305.04279. docs/ltp.md and docs/ltp-rates.md have the protocol and its rates.
"""
