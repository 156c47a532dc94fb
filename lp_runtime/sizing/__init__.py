"""How many tokens a step feeds: the cost model, the host's cost and the step budget. Pure integers."""
