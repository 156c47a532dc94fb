"""Forward passes: inputs, masks, captured graphs, slices of the vocabulary."""
