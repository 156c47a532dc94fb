"""lp-serve: an HTTP server in the form of the OpenAI API."""
