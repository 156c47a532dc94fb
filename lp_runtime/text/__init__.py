"""Text of token ids: the one definition for streams, stop strings, log-probabilities and constraints."""
