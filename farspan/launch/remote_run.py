"""A run whose rank 0 works on a host with a disk of its own: its folder goes there, and what it
records comes back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from farspan.corpus import find, tokens
from farspan.domain.cluster import Cluster, Host
from farspan.domain.codec import load, missing_path, to_json
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest, token_file_sizes
from farspan.domain.escapes import shell_word
from farspan.domain.file_transfer import send_files
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.launch.checkpoint_mirror import CheckpointMirror, FlawOf
from farspan.launch.hosts import ask, quoted, started
from farspan.launch.processes import run_folder

#: Events are asked for this often; a question takes a process, and over ssh a connection.
PULL_S = 1.0
#: A question is answered within this; files may take as long as they keep coming.
ANSWER_S = 20.0
#: Bytes of events that one question brings at most.
MOST_EVENT_BYTES = 2**26
#: What a worker opens of a Hugging Face folder; the same weights may lie beside them in other
#: formats.
MODEL_FILES = (".json", ".safetensors")


class RemoteRun:
    """The folder of one run on the host of its rank 0, beside the one here."""

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

    def send(self) -> None:
        """Plan, tokens and what was saved, unless they are there. Raises Refusal
        (host-unreachable)."""
        record = load(self._here.record, RunRecord)
        corpus = (
            Path(self._host.folder or "")
            / "cache"
            / find.CORPORA
            / find.sent_name(self._plan.inputs.corpus)
        )
        if not self._has_corpus(corpus):
            self._send_corpus(corpus)
        if self._ask(f"cat {quoted(self._there.plan)}") is None:
            here = self._here
            sent = [
                here.corpus,
                here.tokenizer,
                here.estimate,
                here.events,
                here.checkpoints,
                here.plan,
            ]
            moved = msgspec.structs.replace(
                record, corpus=str(corpus), initial=self._send_initial(record.initial)
            )
            files = [path for path in sent if path.exists()]
            self._put(
                [(path, path.name) for path in files],
                self._there.path,
                {"run.json": to_json(moved)},
            )
        else:
            self._send_newest_checkpoint()
        if self._here.epochs.exists():
            self._put([(self._here.epochs, self._here.epochs.name)], self._there.path)
        # What was recorded there and never came back comes now.
        self._pulled = self._here.events.stat().st_size if self._here.events.exists() else 0
        self.pull()

    def _has_corpus(self, corpus: Path) -> bool:
        """Whether the host has a whole copy of the corpus: its manifest, and token files of the
        sizes that this says."""
        names = ["corpus.json", *TOKEN_FILES]
        sizes = "; ".join(f"wc -c < {name}" for name in TOKEN_FILES)
        answer = self._ask(f"cd {quoted(corpus)} && ls {' '.join(names)} >&2 && ({sizes})")
        if answer is None:
            return False
        manifest = load(self._here.corpus, CorpusManifest)
        return answer.split() == [b"%d" % size for size in token_file_sizes(manifest)]

    def _send_corpus(self, corpus: Path) -> None:
        """Send the corpus, every block of it verified first. Raises Refusal (path-missing,
        corpus-damaged, host-unreachable)."""
        folder = find.require_corpus(self._here, self._plan.inputs.corpus)
        manifest = load(folder / "corpus.json", CorpusManifest)
        tokens.verify(folder, manifest, find.mending_command(self._here, folder))
        # The file that says what the folder is comes last: without it the folder counts as empty.
        self._put([(folder / name, name) for name in (*TOKEN_FILES, "corpus.json")], corpus)

    def _send_newest_checkpoint(self) -> None:
        """Send the newest checkpoint here, if a host that has the run lacks it: the run may have
        gone on elsewhere since."""
        if (step := self._here.newest_checkpoint()) >= 0:
            path = self._here.checkpoints / f"step-{step:08d}"
            manifest = quoted(self._there.checkpoints / path.name / "manifest.json")
            if self._ask(f"cat {manifest}") != (path / "manifest.json").read_bytes():
                self._put([(path, f"{self._here.checkpoints.name}/{path.name}")], self._there.path)

    def _send_initial(self, initial: str | None) -> str | None:
        """The model that the run starts from; where it lies there. Raises Refusal
        (path-missing)."""
        if initial is None:
            return None
        here = Path(initial)
        there = self._there.path / "initial"
        if not here.is_dir():
            raise missing_path(here)
        files = [
            path for path in sorted(here.iterdir()) if path.suffix in MODEL_FILES and path.is_file()
        ]
        self._put([(_inside(path, here), path.name) for path in files], there)
        return str(there)

    def pull(self, *, now: bool = True) -> None:
        """Append the events here that were written there; without `now` only if it is time to ask
        again."""
        if not now and time.monotonic() - self._asked_at < PULL_S:
            return
        self._asked_at = time.monotonic()
        new = self._ask(
            f"tail -c +{self._pulled + 1} {quoted(self._there.events)} | head -c {MOST_EVENT_BYTES}"
        )
        # Whole lines only: one that a killed worker leaves unfinished is cut there by the next.
        if whole := (new or b"")[: (new or b"").rfind(b"\n") + 1]:
            with open_own(self._here.events, "ab") as file:
                file.write(whole)
            self._pulled += len(whole)

    def fetch(self) -> None:
        """Copy the checkpoints that are there and not here. Raises Refusal (host-unreachable) that
        says where they are."""
        self.mirror.copy_missing()

    def _ask(self, text: str) -> bytes | None:
        return ask(self._host, text, ANSWER_S, MOST_EVENT_BYTES)

    def _put(
        self,
        files: Iterable[tuple[Path, str]],
        folder: Path,
        contents: dict[str, bytes] | None = None,
    ) -> None:
        where = quoted(folder)
        with started(
            self._host,
            f"umask 077 && mkdir -p {where}/logs && tar -xf - -C {where}",
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None and process.stderr is not None
            try:
                with process.stdin:
                    send_files(process.stdin, files, contents)
            except BrokenPipeError:
                pass  # What it says tells more.
            said = process.stderr.read().decode(errors="replace").strip()
        if process.returncode:
            raise Refusal(
                "host-unreachable",
                what=f"{self._host.name} does not take the run's files",
                where=f"{self._host.name}, {folder}",
                fact=said[-300:] or f"exit code {process.returncode}",
                remedy="farspan doctor --cluster, with the same cluster",
            )


def remote_run(
    plan: Plan, run: RunFolder, cluster: Cluster, flaw_of: FlawOf | None = None
) -> RemoteRun | None:
    """The folder of a run on the host of its rank 0; None where that sees the run's folder here, or
    is not in the cluster."""
    first = next((host for host in cluster.hosts if host.name == plan.devices[0].host), None)
    if first is None or first.folder is None:
        return None
    return RemoteRun(first, plan, run, run_folder(first, plan, run), flaw_of)


def _inside(path: Path, folder: Path) -> Path:
    """The file that a name in a model's folder leads to. In the cache of Hugging Face all files are
    links to `blobs` of the same model. Raises Refusal (path-unusable) for a link out of the model,
    which would send what is there."""
    real = path.resolve()
    whole = folder.resolve()
    cached = whole.parent.name == "snapshots" and real.is_relative_to(whole.parent.parent / "blobs")
    if not (real.is_relative_to(whole) or cached):
        raise Refusal(
            "path-unusable",
            what="a file of the model is a link that leads out of its folder",
            where=path,
            fact=f"it leads to {real}, which would be sent to another host",
            remedy=f"cp --remove-destination {shell_word(real)} {shell_word(path)}",
        )
    return real
