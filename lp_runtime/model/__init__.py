"""The model: the only home of transformers. Load, prefill, forward a share, cut the cache, check itself."""
