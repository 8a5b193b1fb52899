"""Sites and the long links between them, on one machine: network namespaces and a packet emulator."""
