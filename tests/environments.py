"""Environments of their own for libraries that do not install beside farspan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Installing takes some minutes.
INSTALL_LIMIT_S = 1200


def install_apart(requirement: str, folder: Path, variable: str) -> Path | None:
    """Make an environment with a library and return its Python; None where it cannot be installed.
    One that the variable names is used instead."""
    if given := os.environ.get(variable):
        return Path(given)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_LIMIT_S)
        subprocess.run([*install, requirement], check=True, timeout=INSTALL_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return python
