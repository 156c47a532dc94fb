"""Runs lp-generate as `python -m lp_runtime`."""

from lp_runtime.entrypoints.cli import main

if __name__ == "__main__":
    main()
