"""Print how long each answer of a server's ``/health/live`` takes, on a new connection each time.

    python tools/health_times.py HOST PORT

A process of its own: what else a client does is not in the times. It prints seconds, one a line,
until it is terminated.
"""

from __future__ import annotations

import socket
import sys
import time

BETWEEN = 0.1
"""Seconds between two requests."""

REQUEST = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def one(host: str, port: int) -> float:
    """Return the seconds from connecting to the end of the answer.

    Raises:
        RuntimeError: it is not "200".
    """
    begun = time.perf_counter()
    with socket.create_connection((host, port), timeout=600) as connection:
        connection.sendall(REQUEST)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"/health/live answered {answer[:100]!r}")
    return time.perf_counter() - begun


def main() -> None:
    """Print times for ever."""
    host, port = sys.argv[1], int(sys.argv[2])
    while True:
        print(one(host, port), flush=True)
        time.sleep(BETWEEN)


if __name__ == "__main__":
    main()
