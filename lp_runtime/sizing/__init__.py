"""Step sizing: cost model, host cost, drafting schedule, step budget. Integers only."""
