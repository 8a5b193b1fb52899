"""What goes over the network: messages and limits. Parsers of bytes from outside end in `_untrusted`."""
