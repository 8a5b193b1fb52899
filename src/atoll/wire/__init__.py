"""Messages on the network, and their limits. Parsers of bytes from outside end in `_untrusted`."""
