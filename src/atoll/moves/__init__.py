"""Which chunk moves when: pure decisions for the memory of a device."""
