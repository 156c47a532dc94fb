"""The algorithm: token tree, decoding state, drafters, acceptance. No torch, model or communication."""
