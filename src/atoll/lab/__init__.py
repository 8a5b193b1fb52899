"""Sites and the long links between them, on one machine: network namespaces, joined by an emulator."""
