"""The per-request decoder and the factories that build its parts."""
