#!/usr/bin/env python3
"""Check the health of the image: status 0 if lp-serve can answer, 1 if it is loading or has no replica.

python launch/healthcheck.py [COMMAND LINE]      default: that of process 1, with its host, port and certificate
"""

from __future__ import annotations

import ssl
import sys
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 4
LOOPBACK = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # of the addresses that stand for all


def health_url(arguments: list[str]) -> str:
    """Return the URL of /health of an lp-serve with these arguments; the last value of a setting counts."""
    settings = dict(argument.partition("=")[::2] for argument in arguments)
    scheme = "https" if "ssl_certfile" in settings else "http"
    host = settings.get("host", "127.0.0.1").strip("[]'\"")
    host = LOOPBACK.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.get('port', '8000')}/health"


def main() -> None:
    arguments = sys.argv[1:] or Path("/proc/1/cmdline").read_text().split("\0")
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # the certificate has a public name
    # Without the proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust))
    try:
        opener.open(health_url(arguments), timeout=TIMEOUT_SECONDS)
    except OSError as error:  # includes every status except 200
        sys.exit(f"{health_url(arguments)}: {error}")


if __name__ == "__main__":
    main()
