"""The prompt: prefix cache, top-k candidates of its tokens, log-probabilities, resuming."""
