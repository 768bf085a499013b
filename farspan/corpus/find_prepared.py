"""Find a prepared corpus today: in this machine's cache, by its hash, or where it was when a run
began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from farspan.corpus.token_files import is_whole
from farspan.domain.corpus import SENT, CorpusManifest
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord, cache_folder
from farspan.domain.struct_files import load

#: The folder of prepared corpora in a cache.
CORPORA = "corpora"


def find_corpus(recorded: Path, digest: str) -> Path | None:
    """Return the folder of the corpus with this hash; None where no whole one is there.

    The cache of today comes first: what `farspan prepare` has mended lies there.
    """
    for folder in (*_cached_folders(digest), recorded):
        if is_corpus(folder, digest):
            return folder
    return None


def require_corpus(run: RunFolder, digest: str) -> Path:
    """Return the folder of a run's corpus. Raises Refusal (path-missing, or corpus-damaged if a
    file of it has another size)."""
    recorded = load(run.record, RunRecord).corpus_folder
    folder = find_corpus(recorded, digest)
    if folder is None:
        raise missing_corpus(run, digest, recorded)
    return folder


def missing_corpus(run: RunFolder, digest: str, recorded: Path) -> Refusal:
    """Return the refusal of a run whose corpus is nowhere."""
    lacking = "is damaged" if recorded.exists() else "is not there"
    places = [str(folder) for folder in _cached_folders(digest)]
    return Refusal(
        "path-missing",
        what="the corpus of this run is not there",
        where=recorded,
        fact=f"this folder {lacking}; nor is corpus {digest} in {', '.join(places) or 'a cache'}",
        remedy=run.prepare_command(),
    )


def is_corpus(folder: Path, digest: str) -> bool:
    """Check that a folder holds the corpus with this hash, and token files of the right sizes."""
    with suppress(Refusal, OSError):
        manifest = load(folder / "corpus.json", CorpusManifest)
        return manifest.hash == digest and is_whole(folder, manifest)
    return False


def mending_command(run: RunFolder, folder: Path) -> str:
    """Return the command that mends a damaged corpus of a run: the next start sends a copy
    again."""
    return run.resume_command() if folder.name.startswith(SENT) else run.prepare_command()


def sent_name(digest: str) -> str:
    """Return the name of the folder of a copy in a cache."""
    return f"{SENT}{digest}"


def _cached_folders(digest: str) -> Iterator[Path]:
    """Yield where the corpus may lie in the cache of this machine, prepared or sent."""
    with suppress(RuntimeError):  # A user without a home folder has no cache in it.
        corpora = cache_folder() / CORPORA
        yield corpora / digest
        yield corpora / sent_name(digest)
