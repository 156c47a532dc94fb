"""Drafters: what a step's token tree proposes."""
