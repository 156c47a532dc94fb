"""Driver side of replicas in other processes: the replica pool, its groups, and requests."""
