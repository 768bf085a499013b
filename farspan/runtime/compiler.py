"""PyTorch's compiler: where it keeps what it has made, so that a run that is started again compiles
nothing; and why it failed."""

from __future__ import annotations

import os
from contextlib import suppress

from farspan.domain.run import make_cache_folder

#: What PyTorch's compiler reads; it keeps Triton's part in the same folder, unless TRITON_CACHE_DIR
#: names another (docs.pytorch.org, "Compile Time Caching Configuration").
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
FOLDER = "compiled"


def keep_compiled_code() -> None:
    """Let the compiler keep its results in farspan's cache, unless the user has named a place. It
    must not be imported yet, as it then chooses its own.

    What lies there is executed: in a cache that others may write to PyTorch's own place is left.
    """
    if CACHE_VARIABLE in os.environ:
        return
    with suppress(OSError, RuntimeError):  # No home folder, or a disk that takes nothing.
        folder = make_cache_folder(FOLDER)
        if not os.access(folder, os.W_OK):
            return
        state = folder.stat()
        if hasattr(os, "getuid") and state.st_uid != os.getuid():
            return
        folder.chmod(0o700)
        os.environ[CACHE_VARIABLE] = str(folder)


def describe_failure(error: Exception) -> str:
    """Describe a compiler's failure in a line."""
    # What a backend raised comes under a line that names the backend alone.
    cause = getattr(error, "inner_exception", error)
    lines = str(cause).splitlines()
    return next(filter(None, lines), type(cause).__name__)[:200]
