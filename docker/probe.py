"""Exit 0 where an HTTP URL answers 200, else 1 with the answer's text: the images' health check.

Run: python docker/probe.py URL. Standard library only, because it runs every few seconds.
"""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def why_not(url: str) -> str | None:
    """Return None where `url` answers 200, else what was the matter."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        body = response.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if response.status == http.HTTPStatus.OK else f"{url}: {response.status} {body}"


if __name__ == "__main__":
    problem = why_not(sys.argv[1])
    if problem is not None:
        print(problem)
        raise SystemExit(1)
