"""`python -m lp_runtime` is lp-generate."""

from lp_runtime.entrypoints.cli import main

if __name__ == "__main__":
    main()
