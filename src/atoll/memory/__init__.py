"""Chunked memory: training what does not fit on the device, nor on the host."""
