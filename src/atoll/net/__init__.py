"""All sockets: ZeroMQ endpoints with CURVE, keys, requests with deadlines, and the loss-tolerant
transport's ports."""
