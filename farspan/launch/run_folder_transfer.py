"""Sends the folder of a run to rank 0's host, where that has a disk of its own, and brings back
what it records."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from farspan.corpus import find_prepared, token_files
from farspan.domain.cluster import Cluster, Host
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest, token_file_sizes
from farspan.domain.file_transfer import send_files
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal, command
from farspan.domain.run import SURVIVORS_FOLDER, RunFolder, RunRecord
from farspan.domain.struct_files import load, missing_path, to_json
from farspan.launch.checkpoint_mirror import CheckpointMirror, FlawOf
from farspan.launch.hosts import ask_shell, quote_path, start_shell
from farspan.launch.processes import run_folder
from farspan.models._base_files import resolve_inside

#: Events are asked for this often; a question takes a process, and over ssh a connection.
PULL_S = 1.0
#: A question is answered within this; files may take as long as they keep coming.
RUN_ANSWER_S = 20.0
#: Bytes of events that one question brings at most.
MAX_EVENT_BYTES = 2**26
#: What a worker opens of a Hugging Face folder, which may also hold the same weights in other
#: formats.
MODEL_FILES = (".json", ".safetensors")


class RemoteRun:
    """The folder of one run on the host of its rank 0, and the one here."""

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
        self.mirror = CheckpointMirror(host, plan, here, there, flaw_of)
        self._asked_at = 0.0
        self._pulled = 0

    def send_run(self) -> None:
        """Send plan, tokens and what was saved, unless they are there. Raises Refusal
        (host-unreachable)."""
        here = self._here
        record = load(here.record, RunRecord)
        corpora = Path(self._host.folder or "") / "cache" / find_prepared.CORPORA
        corpus = corpora / find_prepared.sent_name(self._plan.inputs.corpus)
        if not self._has_corpus(corpus):
            self._send_corpus(corpus)
        if self._ask(f"cat {quote_path(self._there.plan)}") is None:
            sent = [
                here.corpus,
                here.tokenizer,
                here.estimate,
                here.events,
                here.checkpoints,
                here.plan,
            ]
            initial = self._send_initial(record.initial)
            moved = msgspec.structs.replace(record, corpus=str(corpus), initial=initial)
            files = [(path, path.name) for path in sent if path.exists()]
            self._send_files(files, self._there.path, {"run.json": to_json(moved)})
        else:
            self._send_newest_checkpoint()
        if here.epochs.exists():
            self._send_files([(here.epochs, here.epochs.name)], self._there.path)
        # What was recorded there and never came back comes now.
        if here.events.exists():
            self._pulled = here.events.stat().st_size
        self.pull_events()

    def _has_corpus(self, corpus: Path) -> bool:
        """Return whether the host has a whole copy of the corpus: its manifest, and token files of
        the sizes that this gives."""
        files = " ".join(["corpus.json", *TOKEN_FILES])
        sizes = "; ".join(f"wc -c < {name}" for name in TOKEN_FILES)
        answer = self._ask(f"cd {quote_path(corpus)} && ls {files} >&2 && ({sizes})")
        if answer is None:
            return False
        manifest = load(self._here.corpus, CorpusManifest)
        return answer.split() == [b"%d" % size for size in token_file_sizes(manifest)]

    def _send_corpus(self, corpus: Path) -> None:
        """Send the corpus, every block of it verified first. Raises Refusal (path-missing,
        corpus-damaged, host-unreachable)."""
        folder = find_prepared.require_corpus(self._here, self._plan.inputs.corpus)
        manifest = load(folder / "corpus.json", CorpusManifest)
        token_files.verify_corpus(
            folder, manifest, find_prepared.mending_command(self._here, folder)
        )
        # The manifest comes last: without it the folder counts as empty.
        files = [(folder / name, name) for name in (*TOKEN_FILES, "corpus.json")]
        self._send_files(files, corpus)

    def _send_newest_checkpoint(self) -> None:
        """Send the newest checkpoint here, if a host that has the run lacks it: the run may have
        gone on elsewhere since."""
        step = self._here.newest_checkpoint()
        if step >= 0:
            path = self._here.checkpoints / f"step-{step:08d}"
            manifest = quote_path(self._there.checkpoints / path.name / "manifest.json")
            if self._ask(f"cat {manifest}") != (path / "manifest.json").read_bytes():
                self._send_files([(path, f"{path.parent.name}/{path.name}")], self._there.path)

    def _send_initial(self, initial: str | None) -> str | None:
        """Send the model that the run starts from; return where it lies there. Raises Refusal
        (path-missing)."""
        if initial is None:
            return None
        here = Path(initial)
        there = self._there.path / "initial"
        if not here.is_dir():
            raise missing_path(here)
        files = []
        for path in sorted(here.iterdir()):
            if path.suffix in MODEL_FILES and path.is_file():
                files.append((resolve_inside(path, here), path.name))
        self._send_files(files, there)
        return str(there)

    def pull_events(self, *, now: bool = True) -> None:
        """Append the events here that were written there; without `now` only if it is time to ask
        again."""
        if not now and time.monotonic() - self._asked_at < PULL_S:
            return
        self._asked_at = time.monotonic()
        events = quote_path(self._there.events)
        new = self._ask(f"tail -c +{self._pulled + 1} {events} | head -c {MAX_EVENT_BYTES}") or b""
        # Whole lines only: one that a killed worker leaves unfinished is cut there by the next.
        whole = new[: new.rfind(b"\n") + 1]
        if whole:
            with open_own(self._here.events, "ab") as file:
                file.write(whole)
            self._pulled += len(whole)

    def has_survivors(self) -> bool:
        """Return whether survivors of a lost worker write the last whole step there."""
        return self._ask(f"test -d {quote_path(self._there.checkpoints / SURVIVORS_FOLDER)}") == b""

    def fetch_checkpoints(self) -> None:
        """Copy the checkpoints that are there and not here. Raises Refusal (host-unreachable) with
        where they are."""
        self.mirror.copy_missing()

    def _ask(self, text: str) -> bytes | None:
        return ask_shell(self._host, text, RUN_ANSWER_S, MAX_EVENT_BYTES)

    def _send_files(
        self,
        files: Iterable[tuple[Path, str]],
        folder: Path,
        contents: dict[str, bytes] | None = None,
    ) -> None:
        where = quote_path(folder)
        script = f"umask 077 && mkdir -p {where}/logs && tar -xf - -C {where}"
        with start_shell(
            self._host, script, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stderr is not None
            try:
                with process.stdin:
                    send_files(process.stdin, files, contents)
            except BrokenPipeError:
                pass  # Its own message explains more.
            message = process.stderr.read().decode(errors="replace").strip()
        if process.returncode:
            raise Refusal(
                "host-unreachable",
                what=f"{self._host.name} does not take the run's files",
                where=f"{self._host.name}, {folder}",
                fact=message[-300:] or f"exit code {process.returncode}",
                remedy=command("doctor", "--cluster", self._host.cluster_name),
            )


def remote_run(
    plan: Plan, run: RunFolder, cluster: Cluster, flaw_of: FlawOf | None = None
) -> RemoteRun | None:
    """Return a run's folder on its rank 0's host; None where that host sees the run's folder here,
    or is not in the cluster."""
    for host in cluster.hosts:
        if host.name == plan.devices[0].host and host.folder is not None:
            return RemoteRun(host, plan, run, run_folder(host, plan, run), flaw_of)
    return None
