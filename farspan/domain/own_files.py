"""Files of a run or of a cache, opened for writing: never through a link.

A run folder may come from somebody else, and a cache may belong to a group. A link in either may
lead to any file of the user's.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO, BinaryIO, Literal

from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal

#: Errors of `open` for a link that it may not follow; FreeBSD's is the second.
IS_LINK = (errno.ELOOP, errno.EMLINK)


def open_own(
    path: Path,
    mode: Literal["wb", "ab", "rb+"],
    *,
    buffering: int = -1,
    private: bool = False,
) -> BinaryIO:
    """Open a file of a run or a cache for writing. Raises Refusal (path-unusable) for a link.

    Only the last part of the path is looked at: folders may be links of the user's own. A new file
    is `private` to this user, or as readable as the user's files are.
    """
    permissions = 0o600 if private else 0o666

    def open_without_link(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, permissions)

    try:
        return open(path, mode, buffering=buffering, opener=open_without_link)
    except OSError as error:
        if error.errno in IS_LINK and path.is_symlink():
            raise _link_refusal(path) from None
        raise


def is_replaced(file: IO[bytes], path: Path) -> bool:
    """Return whether another file lies where an open one was; not where none does."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def refuse_link(path: Path) -> None:
    """Raise Refusal (path-unusable) where a folder that farspan makes itself is a link."""
    if path.is_symlink():
        raise _link_refusal(path)


def _link_refusal(path: Path) -> Refusal:
    return Refusal(
        "path-unusable",
        what="farspan does not write through a link",
        where=path,
        fact=f"it leads to {path.readlink()}",
        remedy=shell_line("mv", "--", path, f"{path}.link"),
    )
