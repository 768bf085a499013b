"""Verify a checkpoint: `python -m farspan.runtime.checkpoint.verify FOLDER`, for processes
that load no PyTorch.

Prints why the checkpoint is not whole, and exits with the code of a corrupt one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from farspan.domain.problems import EXIT_CODES
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.manifest import Corrupt


def main() -> int:
    try:
        checkpoint.verify(Path(sys.argv[1]))
    except Corrupt as error:
        print(error)
        return EXIT_CODES["checkpoint-corrupt"]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
