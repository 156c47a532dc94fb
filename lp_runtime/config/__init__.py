"""Settings as typed dataclasses, each checked where it is made. Hydra goes no further than overrides.py."""
