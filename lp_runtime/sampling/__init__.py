"""How a node's successor is chosen from its logits: processors, Gumbel noise, top-k candidates."""
