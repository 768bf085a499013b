"""One Ray node that lives no longer than who started it: `python -m farspan.launch.ray_node RAY-START-OPTIONS`.

It ends Ray when it is told to (SIGTERM), or when its standard input closes, as it does when the launcher is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    node = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *sys.argv[1:]], stdin=subprocess.DEVNULL
    )
    signal.signal(signal.SIGTERM, lambda number, frame: node.terminate())

    def watch() -> None:
        while os.read(0, 1):
            continue
        node.terminate()

    threading.Thread(target=watch, daemon=True).start()
    node.wait()
    return node.returncode


if __name__ == "__main__":
    raise SystemExit(main())
