"""lp-bench: a comparison of this runtime with transformers' own decoding, on the same prompts."""
