"""A run whose rank 0 works on a host with a disk of its own: its folder goes there, and what it
records comes back."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, cast

import msgspec

from farspan.corpus import find, tokens
from farspan.domain.cluster import Host
from farspan.domain.codec import load, missing_path, to_json
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest, token_file_sizes
from farspan.domain.escapes import shell_word
from farspan.domain.model import parameters
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.problems import command as farspan
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.units import format_bytes
from farspan.launch.hosts import ask, command, quoted

#: Events are asked for this often; a question takes a process, and over ssh a connection.
PULL_S = 1.0
#: A question is answered within this; files may take as long as they keep coming.
ANSWER_S = 20.0
#: Bytes of events that one question brings at most.
MOST_EVENT_BYTES = 2**26
#: The files of a checkpoint as a tar names them, those that a killed worker left unfinished, and
#: bytes of all headers of a checkpoint at most.
CHECKPOINT_FILE = re.compile(
    # Those of earlier versions: a run that they began may go on.
    r"checkpoints/(step-\d+|best|\.step-\d+\.old|\.best\.old)/"
    r"(part-\d+\.safetensors|manifest\.json|(model|optimizer|replica-\d+)\.safetensors|state\.json)"
)
UNFINISHED = re.compile(r"checkpoints/\.[\w.-]+\.tmp/")
HEADER_BYTES = 2**24
#: Where they lie until all have come.
ARRIVING = ".arriving.tmp"
#: What a worker opens of a Hugging Face folder; the same weights may lie beside them in other
#: formats.
MODEL_FILES = (".json", ".safetensors")


class RemoteRun:
    """The folder of one run on the host of its rank 0, beside the one here."""

    def __init__(self, host: Host, plan: Plan, here: RunFolder, there: RunFolder) -> None:
        self._host, self._plan, self._here, self._there = host, plan, here, there
        self._asked_at, self._pulled = 0.0, 0

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
        tokens.verify(folder, manifest, find.remedy(self._here, folder))
        # The file that says what the folder is comes last: without it the folder counts as empty.
        self._put([(folder / name, name) for name in (*TOKEN_FILES, "corpus.json")], corpus)

    def _send_initial(self, initial: str | None) -> str | None:
        """The model that the run starts from; where it lies there. Raises Refusal
        (path-missing)."""
        if initial is None:
            return None
        here, there = Path(initial), self._there.path / "initial"
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
        """Bring the checkpoints back. Raises Refusal (host-unreachable) that says where they
        are."""
        folder = quoted(self._there.path)
        arriving = self._here.checkpoints / ARRIVING
        shutil.rmtree(arriving, ignore_errors=True)
        try:
            with self._started(
                f"cd {folder} && tar -cf - checkpoints",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as process:
                assert process.stdout is not None
                try:
                    stream = cast(IO[bytes], _Bounded(process.stdout, self._plan))
                    with tarfile.open(fileobj=stream, mode="r|") as archive:
                        _extract(archive, arriving)
                except BaseException:
                    process.kill()
                    raise
            for whole in sorted(arriving.iterdir()) if arriving.exists() else ():
                shutil.rmtree(self._here.checkpoints / whole.name, ignore_errors=True)
                os.rename(whole, self._here.checkpoints / whole.name)
        except (tarfile.TarError, _Unexpected) as error:
            if (
                not isinstance(error, tarfile.ReadError)
                or self._ask(f"ls {folder}/checkpoints") is not None
            ):
                raise Refusal(
                    "host-unreachable",
                    what="the checkpoints did not come back",
                    where=f"{self._host.name}, {folder}",
                    fact=str(error),
                    remedy=farspan("resume", self._here.path),
                ) from None
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def _ask(self, text: str) -> bytes | None:
        return ask(self._host, text, ANSWER_S, MOST_EVENT_BYTES)

    def _started(self, text: str, **streams: int) -> subprocess.Popen[bytes]:
        """A shell command on the host. Raises Refusal (host-unreachable) where what reaches it is
        not here."""
        words = command(self._host, ["sh", "-c", text])
        try:
            return subprocess.Popen(words, **streams)  # type: ignore[call-overload,no-any-return]
        except OSError as error:
            raise Refusal(
                "host-unreachable",
                what=f"{self._host.name} cannot be reached",
                where=f"host {self._host.name}",
                fact=f"{words[0]}: {error.strerror}",
                remedy="farspan doctor --cluster, with the same cluster",
            ) from None

    def _put(
        self,
        files: Iterable[tuple[Path, str]],
        folder: Path,
        contents: dict[str, bytes] | None = None,
    ) -> None:
        where = quoted(folder)
        with self._started(
            f"umask 077 && mkdir -p {where}/logs && tar -xf - -C {where}",
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None and process.stderr is not None
            try:
                # What the user's own links lead to is sent, not the links.
                with (
                    process.stdin,
                    tarfile.open(fileobj=process.stdin, mode="w|", dereference=True) as archive,
                ):
                    for name, content in (contents or {}).items():
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
                "host-unreachable",
                what=f"{self._host.name} does not take the run's files",
                where=f"{self._host.name}, {folder}",
                fact=said[-300:] or f"exit code {process.returncode}",
                remedy="farspan doctor --cluster, with the same cluster",
            )


class _Unexpected(Exception):
    """What a host sends is not a run's checkpoints."""


class _Bounded:
    """A stream that ends in _Unexpected where it brings more than all checkpoints of a plan
    take."""

    def __init__(self, stream: IO[bytes], plan: Plan) -> None:
        self._stream, self._most = stream, _most_bytes(plan)
        self._left = self._most

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise _Unexpected(
                f"it sends more than {format_bytes(self._most)}, which no checkpoints of this plan "
                "take"
            )
        return content


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """The checkpoints of a tar, each in a folder of its name: regular files of the names that a
    checkpoint has. What comes is another machine's word: anything else raises _Unexpected."""
    for member in archive:
        if member.isdir() or UNFINISHED.match(member.name):
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not CHECKPOINT_FILE.fullmatch(
            member.name
        ):
            raise _Unexpected(f"it sends {member.name!r}, which is no file of a checkpoint")
        target, content = (
            folder / Path(member.name).relative_to("checkpoints"),
            archive.extractfile(member),
        )
        assert content is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_own(target, "wb") as file:
            shutil.copyfileobj(content, file)


def _most_bytes(plan: Plan) -> int:
    """What all checkpoints of a plan take together at most: fp32 masters and two moments of each
    replica, the model that they met at and the outer momentum, in the checkpoints that are kept,
    the one that is written, and the best."""
    each = 4 * parameters(plan.model) * (2 + 3 * len(plan.replicas)) + HEADER_BYTES
    return (plan.train.keep + 2) * each


def _inside(path: Path, folder: Path) -> Path:
    """The file that a name in a model's folder leads to. In the cache of Hugging Face all files are
    links to `blobs` of the same model. Raises Refusal (path-unusable) for a link out of the model,
    which would send what is there."""
    real, whole = path.resolve(), folder.resolve()
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
