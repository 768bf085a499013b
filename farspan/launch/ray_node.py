"""One Ray node that lives no longer than who started it: `python -m farspan.launch.ray_node RAY-START-OPTIONS`.

The first line of its standard input is the token: everybody on the machine can read a command line. It ends Ray when it
is told to (SIGTERM), or when its standard input ends, as it does when the launcher is gone.
"""

from __future__ import annotations

import os
import sys
import tempfile

from farspan.launch.held import run


def main() -> int:
    token = sys.stdin.readline().strip()
    # Not below a run or $TMPDIR: Ray's sockets lie there, and a socket's path has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="fr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--temp-dir={folder}"]
        return run([*words, *sys.argv[1:]], {**os.environ, "RAY_AUTH_TOKEN": token})


if __name__ == "__main__":
    raise SystemExit(main())
