"""Loading: from a checkpoint to a model on its device or devices."""
