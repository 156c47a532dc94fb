"""Transports over which replicas exchange rows: shared memory, collectives, or both."""
