"""Shares a step among replicas: the partition (pure functions) and the exchange (all collectives)."""
