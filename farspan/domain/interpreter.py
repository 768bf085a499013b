"""How farspan starts Python: never with the current folder on the module path.

`python -m` and `python -c` put the current folder first on `sys.path`. There a user's own
`queue.py` would break a process, and a stranger's `torch.py` would run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Read by Python 3.11 and newer, also by what a child starts itself, as torchrun and Ray do.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def module_command(python: str, module: str, *words: str) -> list[str]:
    """Build the command that runs a module with this interpreter, here or on a host.

    The command sets the variable itself, as ssh and `enter` commands pass none on.
    """
    variables = [f"{name}={value}" for name, value in SAFE_PATH.items()]
    return ["env", *variables, python, "-m", module, *words]


def own_command(module: str, *words: str) -> list[str]:
    """Build the command by which another program on this machine starts a module with this
    interpreter, from whatever folder that is in."""
    return [sys.executable, "-P", "-m", module, *words]


@contextmanager
def safe_path_environment() -> Iterator[None]:
    """Have the processes that a library starts meanwhile inherit `SAFE_PATH`."""
    before = {name: os.environ.get(name) for name in SAFE_PATH}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
