"""A server that speaks S3, moto's, in an environment of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_for

MOTO = "moto[server]==5.2.5"


@contextmanager
def moto_server(python: Path, log: Path) -> Iterator[str]:
    """Run the server; yield its address."""
    words = [python, "-c", "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"]
    with open(log, "wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
    try:

        def address() -> str:
            match = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            return match[0] if match else ""

        yield wait_for(address, "the server listens", process)
    finally:
        process.kill()
        process.wait()
