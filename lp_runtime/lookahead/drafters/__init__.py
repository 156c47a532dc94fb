"""Drafters: each proposes the token trees of a request in its own way."""
