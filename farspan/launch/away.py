"""A run whose rank 0 works on a host with a disk of its own: its folder goes there, and what it records comes back."""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.codec import load, missing_path, to_json
from farspan.domain.corpus import TOKEN_FILES
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.problems import command as farspan
from farspan.domain.run import RunFolder, RunRecord
from farspan.launch.hosts import ask, command, quoted

#: Events are asked for this often; a question takes a process, and over ssh a connection.
PULL_S = 1.0
#: A question is answered within this; files may take as long as they keep coming.
ANSWER_S = 20.0
#: What a worker opens of a Hugging Face folder; the same weights may lie beside them in other formats.
MODEL_FILES = (".json", ".safetensors")


class Away:
    """The folder of one run on the host of its rank 0, beside the one here."""

    def __init__(self, host: Host, plan: Plan, here: RunFolder, there: RunFolder) -> None:
        self._host, self._plan, self._here, self._there = host, plan, here, there
        self._asked_at, self._pulled = 0.0, 0

    def send(self) -> None:
        """Plan, tokens and what was saved, unless they are there. Raises Refusal (host-unreachable)."""
        record = load(self._here.record, RunRecord)
        corpus = Path(self._host.folder or "") / "cache" / "corpora" / f"sent-{self._plan.inputs.corpus}"
        if self._ask(f"cat {quoted(corpus / 'corpus.json')}") is None:
            # The file that says what the folder is comes last: without it the folder counts as empty.
            files = [record.corpus_folder / name for name in (*TOKEN_FILES, "corpus.json")]
            self._put([(path, path.name) for path in files], corpus)
        if self._ask(f"cat {quoted(self._there.plan)}") is None:
            here = self._here
            sent = [here.corpus, here.tokenizer, here.estimate, here.events, here.checkpoints, here.plan]
            moved = msgspec.structs.replace(record, corpus=str(corpus), initial=self._send_initial(record.initial))
            files = [path for path in sent if path.exists()]
            self._put([(path, path.name) for path in files], self._there.path, {"run.json": to_json(moved)})
        # What was recorded there and never came back comes now.
        self._pulled = self._here.events.stat().st_size if self._here.events.exists() else 0
        self.pull()

    def _send_initial(self, initial: str | None) -> str | None:
        """The model that the run starts from; where it lies there. Raises Refusal (path-missing)."""
        if initial is None:
            return None
        here, there = Path(initial), self._there.path / "initial"
        if not here.is_dir():
            raise missing_path(here)
        files = [path for path in sorted(here.iterdir()) if path.suffix in MODEL_FILES and path.is_file()]
        # What links lead to: in the cache of Hugging Face all files are links.
        self._put([(path.resolve(), path.name) for path in files], there)
        return str(there)

    def pull(self, *, now: bool = True) -> None:
        """Append the events here that were written there; without `now` only if it is time to ask again."""
        if not now and time.monotonic() - self._asked_at < PULL_S:
            return
        self._asked_at = time.monotonic()
        new = self._ask(f"tail -c +{self._pulled + 1} {quoted(self._there.events)}")
        # Whole lines only: one that a killed worker leaves unfinished is cut there by the next.
        if whole := (new or b"")[: (new or b"").rfind(b"\n") + 1]:
            with open(self._here.events, "ab") as file:
                file.write(whole)
            self._pulled += len(whole)

    def fetch(self) -> None:
        """Bring the checkpoints back. Raises Refusal (host-unreachable) that says where they are."""
        folder = quoted(self._there.path)
        try:
            with self._started(
                f"cd {folder} && tar -cf - checkpoints", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as process:  # fmt: skip
                assert process.stdout is not None
                with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                    archive.extractall(self._here.path, filter="data")
        except tarfile.TarError as error:
            if not isinstance(error, tarfile.ReadError) or self._ask(f"ls {folder}/checkpoints") is not None:
                raise Refusal(
                    "host-unreachable", what="the checkpoints did not come back", where=f"{self._host.name}, {folder}",
                    fact=str(error), remedy=farspan("resume", self._here.path),
                ) from None  # fmt: skip

    def _ask(self, text: str) -> bytes | None:
        return ask(self._host, text, ANSWER_S)

    def _started(self, text: str, **streams: int) -> subprocess.Popen[bytes]:
        """A shell command on the host. Raises Refusal (host-unreachable) where what reaches it is not here."""
        words = command(self._host, ["sh", "-c", text])
        try:
            return subprocess.Popen(words, **streams)  # type: ignore[call-overload,no-any-return]
        except OSError as error:
            raise Refusal(
                "host-unreachable", what=f"{self._host.name} cannot be reached", where=f"host {self._host.name}",
                fact=f"{words[0]}: {error.strerror}", remedy="farspan doctor --cluster, with the same cluster",
            ) from None  # fmt: skip

    def _put(self, files: Iterable[tuple[Path, str]], folder: Path, made: dict[str, bytes] | None = None) -> None:
        where = quoted(folder)
        with self._started(
            f"mkdir -p {where}/logs && tar -xf - -C {where}", stdin=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stderr is not None
            try:
                with process.stdin, tarfile.open(fileobj=process.stdin, mode="w|") as archive:
                    for name, content in (made or {}).items():
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
                    for path, name in files:
                        archive.add(path, arcname=name)
            except BrokenPipeError:
                pass  # What it says tells more.
            said = process.stderr.read().decode(errors="replace").strip()
        if process.returncode:
            raise Refusal(
                "host-unreachable", what=f"{self._host.name} does not take the run's files",
                where=f"{self._host.name}, {folder}", fact=said[-300:] or f"exit code {process.returncode}",
                remedy="farspan doctor --cluster, with the same cluster",
            )  # fmt: skip
