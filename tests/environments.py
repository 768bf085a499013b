"""Environments of their own for libraries that do not install beside farspan."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

#: Installing takes some minutes.
INSTALL_LIMIT_S = 1200


def install_apart(requirement: str, folder: Path, variable: str) -> Path | None:
    """Make an environment with a library, or with several that spaces separate, and return its
    Python; None where it cannot be installed. One that the variable names is used instead."""
    if given := os.environ.get(variable):
        return Path(given)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_LIMIT_S)
        subprocess.run([*install, *requirement.split()], check=True, timeout=INSTALL_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return python


def install_over(requirement: str, folder: Path, variable: str) -> Path | None:
    """Make an environment like `install_apart` that has the packages of this one in addition: those
    of the library come first."""
    python = install_apart(requirement, folder, variable)
    if python is not None and variable not in os.environ:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = folder / "lib" / version / "site-packages"
        (packages / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
