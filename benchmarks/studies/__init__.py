"""Studies of the benchmark commands; see common.py."""
