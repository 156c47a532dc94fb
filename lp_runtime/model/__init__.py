"""The model: loading, prefill, tree passes, KV cache and self-check. Built on transformers."""
