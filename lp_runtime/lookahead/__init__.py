"""The algorithm: token tree, decoding state, drafters, acceptance. No torch, no model, no communication."""
