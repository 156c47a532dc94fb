"""Drafters: different ways to propose the token trees of a request."""
