"""A warm spare: `python -m farspan.runtime.spare` imports all that a worker needs, and waits for a
place to take.

Standard input may ask first whether it is ready. The place is a line of it, a `SpareTask` as JSON;
what follows is a worker's own input. The end of the input ends a spare that waits, and so does the
end of its parent, also where it stands still and reads nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from farspan.domain.cluster import TAKEN
from farspan.domain.decoding import decode_json
from farspan.domain.own_files import open_own
from farspan.domain.run import SPARE_ASKED, SPARE_READY, SpareTask
from farspan.domain.standard_input import first_line

#: Of Linux's prctl.h: the signal that a process gets when its parent ends; 0 is none.
_PR_SET_PDEATHSIG = 1


def main() -> int:
    # Before what takes seconds: a process that is stopped meanwhile must not outlive the run.
    _signal_at_parents_end(signal.SIGKILL)
    from farspan.runtime import worker
    from farspan.runtime.device import apply_lab_limits

    line = first_line()
    while f"{line}\n".encode() == SPARE_ASKED:
        sys.stdout.buffer.write(SPARE_READY)
        sys.stdout.buffer.flush()
        line = first_line()
    if not line:
        return 0
    task = decode_json(line, SpareTask)
    # A worker whose launcher is gone saves before it ends.
    _signal_at_parents_end(0)
    with open_own(Path(task.log), "ab", private=True) as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    os.environ.update(task.environment)
    # Of an emulated device: its processor time and memory are this process's from now on.
    apply_lab_limits(TAKEN)
    sys.argv[1:] = [task.plan, task.run]
    return worker.main()


def _signal_at_parents_end(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    raise SystemExit(main())
