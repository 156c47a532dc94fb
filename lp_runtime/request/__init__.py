"""The nouns of a request: request, step output, generation."""
