"""Tensor parallelism: one model on several processes, its shards, each with a slice of every layer."""
