"""Checkpoints of a run whose rank 0 works on a host with a disk of its own: each is copied to the
run's folder here as soon as it is saved, while training continues.

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

from farspan import models
from farspan.domain.cluster import Host
from farspan.domain.file_transfer import Unexpected, receive_files
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.problems import command as farspan
from farspan.domain.run import RunFolder
from farspan.domain.units import format_bytes
from farspan.launch.hosts import ask_shell, quote_path, start_shell
from farspan.launch.transfer_pacing import MIRROR_SHARE, Pacer, automatic_rate, given_rate

#: Returns why the checkpoint in a folder is not whole; empty where every byte of it is right.
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
HARD_LINK_FOLDER = ".copied"
#: A host that sends no byte for this long is gone, or a link to it is cut.
SILENCE_TIMEOUT_S = 30.0
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
        self._pacer = Pacer()
        #: What is to be copied next, in the background; None where nothing waits.
        self._waiting: tuple[str, ...] | None = None
        self._closed = False
        self._killed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._warnings = list[str]()

    # -- during training

    def request_copy(self, step: int, *, best: bool, size: int) -> None:
        """Copy the checkpoint of this step, of `size` bytes, in the background, and the best
        weights where they are new. What waited before gives way to it. Training keeps most of the
        network: the copy takes a quarter of the time between two checkpoints."""
        every_s = self._plan.train.checkpoint_every_s
        rate = given_rate(self._here) or automatic_rate(size, every_s, MIRROR_SHARE)
        with self._changed:
            self._pacer.set_rate(rate)
            replaced = self._waiting or ()
            self._waiting = (f"step-{step:08d}",)
            # The best weights first: the checkpoint records how good they are.
            if best or "best" in replaced:
                self._waiting = ("best", *self._waiting)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._copy_requested, daemon=True)
                self._thread.start()
            self._changed.notify()

    def take_warnings(self) -> list[str]:
        """Return the failures since the last call."""
        with self._changed:
            warnings = self._warnings
            self._warnings = []
        return warnings

    def _copy_requested(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                requested = self._waiting or ()
                self._waiting = None
                if self._closed:
                    return
            for checkpoint in requested:
                try:
                    self._copy_checkpoints([checkpoint])
                except (OSError, Unexpected) as error:
                    self._record_copy_failure(checkpoint, str(error))
                except Refusal as refusal:
                    self._record_copy_failure(checkpoint, refusal.problem.fact)

    def _record_copy_failure(self, checkpoint: str, fact: str) -> None:
        """Keep why a copy failed, unless it was stopped or a newer one is to be made."""
        with self._changed:
            if not self._closed and self._waiting is None:
                self._warnings.append(
                    f"{checkpoint} is saved on {self._host.name} and was not copied here: {fact}; "
                    "the next save is copied again"
                )

    def finish_copy(self) -> None:
        """Let the copy that is being made come to its end; nothing is copied in the background
        afterwards."""
        self._pacer.lift()
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
        self.finish_copy()

    # -- between two starts

    def copy_missing(self) -> None:
        """Copy every checkpoint and the best weights that are there and not here. Raises Refusal
        (host-unreachable) with where they are."""
        self._killed = False
        self._pacer.set_rate(None)
        missing = self._list_missing()
        if not missing:
            return
        try:
            self._copy_checkpoints(missing)
        except (OSError, Unexpected) as error:
            raise Refusal(
                "host-unreachable",
                what="the checkpoints did not come back",
                where=f"{self._host.name}, {quote_path(self._there.path)}",
                fact=str(error),
                remedy=farspan("resume", self._here.path),
            ) from None

    def _list_missing(self) -> list[str]:
        """List the checkpoints there whose manifests, with the checksums of all blocks, are not
        here. Raises Refusal (host-unreachable)."""
        folder = quote_path(self._there.checkpoints)
        script = (
            f'cd {folder} 2>/dev/null || exit 0; for name in * .*.old; do [ -d "$name" ] || '
            'continue; printf \'%s\\0\' "$name"; cat "$name/manifest.json" 2>/dev/null; '
            "printf '\\0'; done"
        )
        answer = ask_shell(self._host, script)
        if answer is None:
            raise Refusal(
                "host-unreachable",
                what="the checkpoints cannot be copied from rank 0's host",
                where=f"{self._host.name}, {folder}",
                fact="the host does not answer",
                remedy=farspan("resume", self._here.path),
            )
        fields = answer.split(b"\0")
        missing = []
        for name, manifest in zip(fields[0:-1:2], fields[1::2], strict=False):
            checkpoint = name.decode(errors="replace")
            if CHECKPOINT_FOLDER.fullmatch(checkpoint):
                path = self._here.checkpoints / checkpoint / "manifest.json"
                if not manifest or not path.is_file() or path.read_bytes() != manifest:
                    missing.append(checkpoint)
        return missing

    # -- one copy

    def _copy_checkpoints(self, checkpoints: Sequence[str]) -> None:
        """Copy checkpoints, all or none. Raises OSError and Unexpected where they do not
        come whole, and Refusal (host-unreachable) where the host cannot be reached."""
        arriving = self._here.checkpoints / ARRIVING
        shutil.rmtree(arriving, ignore_errors=True)
        try:
            self._receive_checkpoints(checkpoints, arriving)
            arrived = sorted((arriving / "checkpoints").glob("*"))
            for path in arrived:
                if flaw := self._flaw_of(path):
                    raise Unexpected(f"{path.name} has come damaged: {flaw}")
            for path in arrived:
                replace_checkpoint(path, self._here.checkpoints / path.name)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

        # Delete all but the newest checkpoints here that the plan keeps.
        kept = [
            path
            for path in self._here.checkpoints.glob("step-*")
            if re.fullmatch(r"step-\d{8,20}", path.name)
        ]
        kept.sort(key=lambda path: int(path.name.removeprefix("step-")))
        for path in kept[: -self._plan.train.keep]:
            deleted = path.with_name(f".{path.name}.tmp")
            os.rename(path, deleted)
            shutil.rmtree(deleted, ignore_errors=True)

    def _receive_checkpoints(self, checkpoints: Sequence[str], arriving: Path) -> None:
        links = f"rm -rf {HARD_LINK_FOLDER}"
        for checkpoint in checkpoints:
            source = f"checkpoints/{checkpoint}"
            target = f"{HARD_LINK_FOLDER}/{source}"
            links += (
                f" && mkdir -p {target} && {{ ln {source}/* {target}/ 2>/dev/null || "
                f"cp {source}/* {target}/; }}"
            )
        script = (
            f"cd {quote_path(self._there.path)} && {links} && cd {HARD_LINK_FOLDER} && "
            f"tar -cf - checkpoints; code=$?; cd .. && rm -rf {HARD_LINK_FOLDER}; exit $code"
        )
        with start_shell(
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
                stream = BoundedStream(process.stdout, self._plan, self._pacer)
                receive_files(stream, arriving, CHECKPOINT_FILE.fullmatch, sync=True)
            except BaseException:
                process.kill()
                raise
            finally:
                with self._changed:
                    self._process = None
        if process.returncode:
            raise Unexpected(f"the host ended the copy with exit code {process.returncode}")


class BoundedStream:
    """A stream that ends in Unexpected where it brings more than all checkpoints of a plan take, or
    nothing for SILENCE_TIMEOUT_S. It is read no faster than the pacer allows."""

    def __init__(self, stream: IO[bytes], plan: Plan, pacer: Pacer) -> None:
        self._pacer = pacer
        self._descriptor = stream.fileno()
        self._limit = max_checkpoint_bytes(plan)
        self._received = 0

    def read(self, size: int) -> bytes:
        if not select.select([self._descriptor], [], [], SILENCE_TIMEOUT_S)[0]:
            raise Unexpected(f"it has sent nothing for {SILENCE_TIMEOUT_S:.0f} s")
        content = os.read(self._descriptor, min(size, READ_BYTES))
        self._received += len(content)
        self._pacer.spend(len(content))
        if self._received > self._limit:
            raise Unexpected(
                f"it sends more than {format_bytes(self._limit)}, which no checkpoints of this "
                "plan take"
            )
        return content


def max_checkpoint_bytes(plan: Plan) -> int:
    """Return the most bytes that all checkpoints of a plan take.

    That is fp32 masters and two moments of each replica, the synced parameters and the outer
    momentum, in the checkpoints that are kept, the one that is written, and the best.
    """
    values_per_parameter = 2 + 3 * len(plan.replicas)
    checkpoint_bytes = 4 * models.count_trained(plan.model) * values_per_parameter + HEADER_BYTES
    return (plan.train.keep + 2) * checkpoint_bytes


def replace_checkpoint(arrived: Path, path: Path) -> None:
    """Rename a whole checkpoint into place. One that it replaces is put aside first, where the next
    start finds it if this process is killed in between."""
    old = path.with_name(f".{path.name.strip('.')}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(arrived, path)
    if old != path:
        shutil.rmtree(old, ignore_errors=True)
