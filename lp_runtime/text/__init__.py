"""Text of token ids: the one definition that streams, stop strings, log-probabilities and constraints share."""
