"""Settings as typed dataclasses, each checked at construction. Hydra goes no further than overrides.py."""
