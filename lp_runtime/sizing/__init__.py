"""Decides how many tokens a step feeds: cost model, host cost, drafting state, step budget. Pure integers."""
