"""A client that behaves well: requests, 20 ms between them, timed until its input ends.

It is a process of its own, so that what others send does not slow it. It needs no other module.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time

PAUSE_S = 0.02
TIMEOUT_S = 60.0


def ask(port: int, path: str, body: str) -> int:
    """Ask over a new connection; return the status, 0 without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        response.read()
        return response.status
    except OSError:
        return 0
    finally:
        connection.close()


def main() -> None:
    """Ask until told to end; print when each request began, what it took, and its status.

    The arguments are the port, the path and the body.
    """
    port, path, body = sys.argv[1:]
    over = threading.Event()

    def listen() -> None:
        while os.read(0, 1):
            pass
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    found = []
    while not over.is_set():
        began_s = time.time()
        status = ask(int(port), path, body)
        found.append((began_s, time.time() - began_s, status))
        time.sleep(PAUSE_S)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
