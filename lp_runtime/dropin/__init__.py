"""`lookahead_generate`: lookahead decoding inside transformers' `generate`."""
