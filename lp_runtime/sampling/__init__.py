"""How a node's successor is sampled from its logits: processors, Gumbel noise, top-k candidates."""
