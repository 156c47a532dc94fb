"""Step sizing: cost model, host cost, drafting state, step budget. Integers only."""
