"""The model: loading, prefill, tree passes, KV cache, self-check. The main user of transformers."""
