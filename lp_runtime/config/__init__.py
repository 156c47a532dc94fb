"""Settings as typed dataclasses, each checked at construction. Only overrides.py uses Hydra."""
