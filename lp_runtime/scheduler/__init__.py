"""Many requests on one runtime: the queue, and the replicas that each running request holds."""
