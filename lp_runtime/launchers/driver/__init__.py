"""The driver's side of replicas in other processes: who serves which request."""
