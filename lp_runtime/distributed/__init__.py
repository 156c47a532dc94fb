"""Shares a step among replicas: the partition (pure) and the exchange (the only home of collectives)."""
