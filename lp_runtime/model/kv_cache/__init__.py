"""Keys and values: one cache a slot, the pool of free slots, several slots in one pass."""
