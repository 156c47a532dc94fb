"""Messages and tools as clients send them."""
