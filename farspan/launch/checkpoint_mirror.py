"""Checkpoints of a run whose rank 0 works on a host with a disk of its own: each is copied to the
run's folder here as soon as it is saved, while training goes on.

One copy is made at a time. A newer checkpoint takes the place of one that waits. A copy counts when
all of it has come and matches its checksums: then it is renamed into place.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from farspan.domain.cluster import Host
from farspan.domain.file_transfer import Unexpected, receive_files
from farspan.domain.model import parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.problems import command as farspan
from farspan.domain.run import RunFolder
from farspan.domain.units import format_bytes
from farspan.launch.hosts import MOST_BYTES, ask, quoted, started

#: Says why the checkpoint in a folder is not whole; empty where every byte of it is right.
FlawOf = Callable[[Path], str]
#: The folders and files of a checkpoint as a tar names them, and bytes of all headers of a
#: checkpoint at most.
CHECKPOINT_FOLDER = re.compile(r"step-\d+|best|\.step-\d+\.old|\.best\.old")
CHECKPOINT_FILE = re.compile(
    rf"checkpoints/({CHECKPOINT_FOLDER.pattern})/(part-\d+\.safetensors|manifest\.json)"
)
HEADER_BYTES = 2**24
#: Where copies lie until all of them has come; the next save there, or copy here, removes it.
ARRIVING = ".arriving.tmp"
#: The folder on the host that holds hard links to what is being copied: rank 0 may delete it
#: meanwhile.
HELD = ".copied"
#: A host that sends no byte for this long is gone, or a link to it is cut.
QUIET_S = 30.0
READ_BYTES = 2**16


class CheckpointMirror:
    """Copies checkpoints from `there` on a host to `here`. `flaw_of` reads each copy before it
    counts; without it a copy counts when it has come."""

    def __init__(
        self,
        host: Host,
        plan: Plan,
        here: RunFolder,
        there: RunFolder,
        flaw_of: FlawOf | None = None,
    ) -> None:
        self._host = host
        self._plan = plan
        self._here = here
        self._there = there
        self._flaw_of = flaw_of or (lambda path: "")
        #: What is to be copied next, in the background; None where nothing waits.
        self._waiting: tuple[str, ...] | None = None
        self._closed = self._killed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._warnings = list[str]()

    # -- while training goes on

    def request(self, step: int, *, best: bool) -> None:
        """Copy the checkpoint of this step in the background, and the best weights where they are
        new. What waited before gives way to it."""
        with self._changed:
            best = best or (self._waiting is not None and "best" in self._waiting)
            # The best weights first: the checkpoint says how good they are.
            self._waiting = (*(("best",) if best else ()), f"step-{step:08d}")
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify()

    def warnings(self) -> list[str]:
        """What went wrong since this was last asked."""
        with self._changed:
            told = self._warnings
            self._warnings = []
        return told

    def _work(self) -> None:
        while (names := self._next()) is not None:
            for name in names:
                try:
                    self._copy([name])
                except (OSError, Unexpected, Refusal) as error:
                    self._excuse(name, error)

    def _next(self) -> tuple[str, ...] | None:
        """What to copy next, once there is something; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting is not None)
            names = self._waiting
            self._waiting = None
            return None if self._closed else names

    def _excuse(self, name: str, error: Exception) -> None:
        """Keep why a copy failed, unless it was stopped or a newer one is to be made."""
        with self._changed:
            if not self._closed and self._waiting is None:
                said = error.problem.fact if isinstance(error, Refusal) else str(error)
                self._warnings.append(
                    f"{name} is saved on {self._host.name} and was not copied here: {said}; "
                    "the next save is copied again"
                )

    def finish(self) -> None:
        """Let the copy that is being made come to its end; nothing is copied in the background
        afterwards."""
        with self._changed:
            self._closed = True
            self._waiting = None
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the copy that is being made, if any."""
        with self._changed:
            self._killed = True
            if self._process is not None:
                self._process.kill()
        self.finish()

    # -- between two starts

    def copy_missing(self) -> None:
        """Copy every checkpoint and the best weights that are there and not here. Raises Refusal
        (host-unreachable) that says where they are."""
        self._killed = False
        there = self._manifests_there()
        missing = [name for name, manifest in there.items() if not self._is_here(name, manifest)]
        if not missing:
            return
        try:
            self._copy(missing)
        except (OSError, Unexpected) as error:
            raise Refusal(
                "host-unreachable",
                what="the checkpoints did not come back",
                where=f"{self._host.name}, {quoted(self._there.path)}",
                fact=str(error),
                remedy=farspan("resume", self._here.path),
            ) from None

    def _manifests_there(self) -> dict[str, bytes]:
        """The manifest of each checkpoint there; empty where it has none. Raises Refusal
        (host-unreachable)."""
        folder = quoted(self._there.checkpoints)
        answer = ask(
            self._host,
            f'cd {folder} 2>/dev/null || exit 0; for name in * .*.old; do [ -d "$name" ] || '
            'continue; printf \'%s\\0\' "$name"; cat "$name/manifest.json" 2>/dev/null; '
            "printf '\\0'; done",
            most=MOST_BYTES,
        )
        if answer is None:
            raise Refusal(
                "host-unreachable",
                what="the checkpoints cannot be copied from rank 0's host",
                where=f"{self._host.name}, {folder}",
                fact="the host does not answer",
                remedy=farspan("resume", self._here.path),
            )
        fields = answer.split(b"\0")
        named = zip(fields[0:-1:2], fields[1::2], strict=False)
        return {
            text: manifest
            for name, manifest in named
            if CHECKPOINT_FOLDER.fullmatch(text := name.decode(errors="replace"))
        }

    def _is_here(self, name: str, manifest: bytes) -> bool:
        """Whether a checkpoint with this manifest, which has the checksums of all its blocks, lies
        here."""
        path = self._here.checkpoints / name / "manifest.json"
        return bool(manifest) and path.is_file() and path.read_bytes() == manifest

    # -- one copy

    def _copy(self, names: Sequence[str]) -> None:
        """Copy checkpoints, all or none. Raises OSError and Unexpected where they do not
        come whole, and Refusal (host-unreachable) where the host cannot be reached."""
        arriving = self._here.checkpoints / ARRIVING
        shutil.rmtree(arriving, ignore_errors=True)
        try:
            self._receive(names, arriving)
            arrived = sorted((arriving / "checkpoints").glob("*"))
            for path in arrived:
                if flaw := self._flaw_of(path):
                    raise Unexpected(f"{path.name} has come damaged: {flaw}")
            for path in arrived:
                _put(path, self._here.checkpoints / path.name)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
        self._prune()

    def _receive(self, names: Sequence[str], arriving: Path) -> None:
        held = [
            f"mkdir -p {HELD}/checkpoints/{name} && "
            f"{{ ln checkpoints/{name}/* {HELD}/checkpoints/{name}/ 2>/dev/null || "
            f"cp checkpoints/{name}/* {HELD}/checkpoints/{name}/; }}"
            for name in names
        ]
        script = (
            f"cd {quoted(self._there.path)} && rm -rf {HELD} && {' && '.join(held)} && "
            f"cd {HELD} && tar -cf - checkpoints; code=$?; cd .. && rm -rf {HELD}; exit $code"
        )
        with started(
            self._host,
            script,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        ) as process:
            assert process.stdout is not None
            with self._changed:
                self._process = process
                if self._killed:
                    process.kill()
            try:
                stream = Bounded(process.stdout, self._plan)
                receive_files(stream, arriving, CHECKPOINT_FILE.fullmatch, sync=True)
            except BaseException:
                process.kill()
                raise
            finally:
                with self._changed:
                    self._process = None
        if process.returncode:
            raise Unexpected(f"the host ended the copy with exit code {process.returncode}")

    def _prune(self) -> None:
        """Delete all but the newest checkpoints here that the plan keeps."""
        steps = [
            path
            for path in self._here.checkpoints.glob("step-*")
            if re.fullmatch(r"step-\d{8,20}", path.name)
        ]
        steps.sort(key=lambda path: int(path.name.removeprefix("step-")))
        for path in steps[: -self._plan.train.keep]:
            left = path.with_name(f".{path.name}.tmp")
            os.rename(path, left)
            shutil.rmtree(left, ignore_errors=True)


class Bounded:
    """A stream that ends in Unexpected where it brings more than all checkpoints of a plan take, or
    nothing for QUIET_S."""

    def __init__(self, stream: IO[bytes], plan: Plan) -> None:
        self._descriptor = stream.fileno()
        self._most = most_bytes(plan)
        self._left = self._most

    def read(self, size: int) -> bytes:
        if not select.select([self._descriptor], [], [], QUIET_S)[0]:
            raise Unexpected(f"it has sent nothing for {QUIET_S:.0f} s")
        content = os.read(self._descriptor, min(size, READ_BYTES))
        self._left -= len(content)
        if self._left < 0:
            raise Unexpected(
                f"it sends more than {format_bytes(self._most)}, which no checkpoints of this plan "
                "take"
            )
        return content


def most_bytes(plan: Plan) -> int:
    """What all checkpoints of a plan take together at most: fp32 masters and two moments of each
    replica, the model that they met at and the outer momentum, in the checkpoints that are kept,
    the one that is written, and the best."""
    each = 4 * parameters(plan.model) * (2 + 3 * len(plan.replicas)) + HEADER_BYTES
    return (plan.train.keep + 2) * each


def _put(arrived: Path, path: Path) -> None:
    """Rename a whole checkpoint into place. One that it replaces is put aside first, where the next
    start finds it if this process is killed in between."""
    old = path.with_name(f".{path.name.strip('.')}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(arrived, path)
    if old != path:
        shutil.rmtree(old, ignore_errors=True)
