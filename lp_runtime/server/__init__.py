"""An HTTP server that speaks the OpenAI API."""
