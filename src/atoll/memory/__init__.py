"""Memory in tiers: arenas on the device, in host memory and on disk, and the engine that moves chunks between them."""
