"""One model on several processes, its shards: each holds a slice of every layer."""
