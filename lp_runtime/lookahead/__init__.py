"""The algorithm: token tree, window, pool, acceptance. Pure: no collectives, no model, no launcher."""
