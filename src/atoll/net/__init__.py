"""The only sockets: ZeroMQ endpoints with CURVE, keys, and requests with deadlines."""
