"""What is refused before any work is done: no PyTorch, GPUs that it cannot use, a place where
something lies."""

from __future__ import annotations

import sys
from pathlib import Path

from farspan.domain.config import RunConfig
from farspan.domain.install import advise_cpu_torch, install_command
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path


def require_torch() -> None:
    """Refuse where training is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise Refusal(
            "extra-missing",
            what="training needs PyTorch",
            where=sys.executable,
            fact="torch is not installed there" + advise_cpu_torch(),
            remedy=install_command("train"),
        )


def check_gpus(config: RunConfig) -> tuple[str, ...]:
    """Return a note on each GPU of this machine that is not among the devices that run.yaml asks
    for; refuses where PyTorch can use none."""
    from farspan.launch import probe_client

    require_torch()
    return probe_client.check_gpus(config.parallel.device)


def require_gguf_library() -> None:
    """Refuse to write GGUF files where the library for them is not installed."""
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise Refusal(
            "extra-missing",
            what="GGUF files are written by llama.cpp's library, which is not installed",
            where=sys.executable,
            fact="gguf is not installed there",
            remedy=install_command("gguf"),
        )


def unused_path(path: Path) -> Path:
    """Return a path at which nothing lies: this one, or the first of `path-2`, `path-3`, ..."""
    unused = path
    number = 1
    while unused.exists():
        number += 1
        unused = Path(f"{path}-{number}")
    return unused


def unused_file(path: Path) -> Path:
    """Return a file's path at which nothing lies: this one, or the first of `NAME-2.json`, ..."""
    unused = path
    number = 1
    while unused.exists():
        number += 1
        unused = path.with_stem(f"{path.stem}-{number}")
    return unused


def refuse_existing(path: Path, remedy: str) -> None:
    """Refuse a path where anything lies: nothing is ever written over."""
    # "new/.." is this folder as soon as "new" is made, and until then it does not exist.
    target = path.resolve()
    is_folder = target.is_dir()
    if target.exists() and (not is_folder or any(target.iterdir())):
        raise Refusal(
            "run-exists",
            what=f"this {'folder' if is_folder else 'file'} exists already",
            where=path,
            fact="nothing is ever written over",
            remedy=remedy,
        )


def refuse_file(path: Path, remedy: str) -> None:
    """Refuse a file to be written later on that is there, or whose folder is not: what is measured
    would be lost."""
    refuse_existing(path, remedy)
    if not path.absolute().parent.is_dir():
        raise missing_path(path.absolute().parent)
