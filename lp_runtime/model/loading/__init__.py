"""From a checkpoint to a model on its device."""
