"""KV caches: one per slot, the pool of free slots, the prefix cache, and several slots in one pass."""
