"""A server that speaks S3, moto's, in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_for

#: Installing takes a minute.
INSTALL_LIMIT_S = 600
MOTO = "moto[server]==5.2.5"


def install_moto(folder: Path) -> Path | None:
    """Make an environment with moto and return its Python; None where it cannot be installed. One
    that `FARSPAN_TEST_MOTO` names is used instead."""
    if given := os.environ.get("FARSPAN_TEST_MOTO"):
        return Path(given)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", MOTO]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_LIMIT_S)
        subprocess.run(install, check=True, timeout=INSTALL_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return python


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
