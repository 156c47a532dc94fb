"""How replicas exchange rows: shared memory, collectives, several machines."""
