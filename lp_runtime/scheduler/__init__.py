"""Many requests on one runtime: the queue, and the allocation of replicas to running requests."""
