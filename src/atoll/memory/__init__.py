"""Memory in tiers: arenas on the device, in host memory and on disk, and the engine between them."""
