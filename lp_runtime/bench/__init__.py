"""lp-bench: this runtime beside transformers' own decoding, on the same prompts, in one run."""
