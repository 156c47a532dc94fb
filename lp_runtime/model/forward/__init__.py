"""Forward passes: inputs, masks, CUDA graphs, and shards that hold a slice of the vocabulary."""
