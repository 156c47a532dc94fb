"""lp-serve: an OpenAI-compatible HTTP server."""
