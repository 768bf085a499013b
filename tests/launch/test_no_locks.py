"""A file system without locks, as NFS may be mounted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

LOCKING = """
import sys
from pathlib import Path
from farspan.domain.problems import Refusal
from farspan.launch.folder_lock import lock_file
try:
    lock_file(Path(sys.argv[1]), "busy", Path(sys.argv[1]))
except Refusal as refusal:
    print(refusal.problem.code, refusal.problem.fact)
"""


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_folder_that_cannot_be_locked_is_refused(error: str, tmp_path: Path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace, which makes flock fail")
    trace = f"--output={tmp_path / 'trace'}"
    inject = [strace, "--quiet=all", trace, "--trace=flock", f"--inject=flock:error={error}"]
    done = subprocess.run(
        [*inject, sys.executable, "-c", LOCKING, tmp_path / "lock"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.stdout.startswith("path-unusable "), done.stderr
    assert "without locks" in done.stdout
