"""A warm spare: `python -m farspan.runtime.spare` imports all that a worker needs, and waits for a
place to take.

The place is a line of standard input, a `SpareTask` as JSON; what follows is a worker's own input.
The end of the input ends a spare that waits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from farspan.domain.cluster import TAKEN
from farspan.domain.own_files import open_own
from farspan.domain.run import SpareTask
from farspan.domain.standard_input import first_line
from farspan.runtime import worker
from farspan.runtime.device import hold


def main() -> int:
    line = first_line()
    if not line:
        return 0
    task = msgspec.json.decode(line, type=SpareTask)
    with open_own(Path(task.log), "ab", private=True) as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    os.environ.update(task.environment)
    # Of an emulated device: its processor time and memory are this process's from now on.
    hold(TAKEN)
    sys.argv[1:] = [task.plan, task.run]
    return worker.main()


if __name__ == "__main__":
    raise SystemExit(main())
