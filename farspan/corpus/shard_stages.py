"""Stages that go shard by shard: spool a source to shards, encode a shard, join the shards to token
files.

A shard is about SHARD_BYTES of text. Each stage writes its files next to the shard and one marker
last, so that interrupted work resumes after the last finished shard.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.documents import (
    COPIES,
    DOCUMENTS,
    cut_document,
    divide_document,
    read_lines,
    write_array,
    write_documents,
)
from farspan.corpus.processes import spawn_pool
from farspan.corpus.sources import Source
from farspan.corpus.token_files import checksums_of
from farspan.domain.corpus import SPLITS, Document, PartSize, Split, SplitName
from farspan.domain.own_files import open_own
from farspan.domain.struct_files import load, save

SHARD_BYTES = 4 << 20
#: Documents encoded at a time.
_BATCH = 64
#: What becomes of a document; one that is CUT is trained on but for its end, which is held out.
DOCUMENT_DROPPED = 0
TRAIN = 1
VAL = 2
CUT = 3
_FATES: dict[SplitName, int] = {"train": TRAIN, "val": VAL}


class FinishedShard(msgspec.Struct, frozen=True, kw_only=True):
    """Marker of a finished shard of text: what it holds."""

    documents: int
    text_bytes: int
    digest: str
    #: The number of its source.
    part: int = 0


def spool_sources(sources: Sequence[Source], work: Path) -> list[FinishedShard]:
    """Write the sources' documents, cleaned, to WORK/00000.docs and so on; finished shards are kept
    as they are. A shard holds text of one source."""
    shards: list[FinishedShard] = []
    while (marker := work / f"{len(shards):05}.shard").exists():
        shards.append(load(marker, FinishedShard))
    for part, source in enumerate(sources):
        # Documents of the finished shards are read again and left out.
        pieces = itertools.chain.from_iterable(map(cut_document, source.documents()))
        finished = sum(shard.documents for shard in shards if shard.part == part)
        rest = itertools.islice(pieces, finished, None)
        while documents := _take_shard(rest):
            stem = work / f"{len(shards):05}"
            write_documents(stem.with_suffix(".docs"), documents)
            digest = hashlib.sha256(b"".join(map(_encode_content, documents))).hexdigest()
            text_bytes = sum(len(document.text.encode()) for document in documents)
            shard = FinishedShard(
                documents=len(documents), text_bytes=text_bytes, digest=digest, part=part
            )
            save(shard, stem.with_suffix(".shard"))
            shards.append(shard)
    return shards


def _encode_content(document: Document) -> bytes:
    """Encode all of a document but its place, so that a corpus keeps its hash when places become
    known."""
    content: dict[str, object] = {
        "title": document.title,
        "text": document.text,
        "origin": document.origin,
        "metadata": document.metadata,
    }
    if document.headings is not msgspec.UNSET:
        content["headings"] = document.headings
    return msgspec.json.encode(content)


def _take_shard(documents: Iterator[Document]) -> list[Document]:
    """Return the next documents, until they hold SHARD_BYTES of text."""
    shard = []
    size = 0
    while size < SHARD_BYTES and (document := next(documents, None)):
        shard.append(document)
        size += len(document.text.encode())
    return shard


def each_shard(function: Callable[..., None], jobs: list[tuple[Any, ...]], workers: int) -> None:
    """Call `function(stem, ...)` for every job, in `workers` processes; those done before are left
    alone."""
    run = functools.partial(_run_once, function)
    if workers == 1:
        for job in jobs:
            run(*job)
    else:
        with spawn_pool(workers) as pool:
            list(pool.map(run, *zip(*jobs, strict=True)))


def _run_once(function: Callable[..., None], stem: Path, *rest: object) -> None:
    marker = stem.with_suffix(f".{function.__name__}.done")
    if not marker.exists():
        function(stem, *rest)
        open_own(marker, "ab").close()


def read_chosen(stem: Path, fate: int) -> Iterator[Document]:
    """Yield the documents of a shard that have this fate, DROPPED, TRAIN or VAL."""
    fates, cuts = np.load(stem.with_suffix(".fates.npy"))
    documents = read_lines(stem.with_suffix(".docs"))
    for document, its, at in zip(documents, fates, cuts, strict=True):
        if its == CUT:
            head, tail = divide_document(document, int(at))
            if fate == TRAIN:
                yield head
            elif fate == VAL:
                yield tail
        elif its == fate:
            # A copy of a text that is CUT is cut alike.
            yield from divide_document(document, int(at)) if at else (document,)


#: A worker encodes many shards with one tokenizer.
_load_tokenizer = functools.lru_cache(maxsize=1)(tokenizers.load_tokenizer)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of stored token ids."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode_shard(stem: Path, tokenizer_file: Path) -> None:
    """Encode the kept documents: each split's tokens (.bin), documents (.zst), and their tokens and
    UTF-8 bytes (.sizes.npy [2, documents])."""
    tokenizer = _load_tokenizer(tokenizer_file)
    dtype = token_dtype(tokenizer.vocab_size)
    for split, fate in _FATES.items():
        documents = list(read_chosen(stem, fate))
        texts = [document.text for document in documents]
        lengths: list[int] = []
        with open_own(stem.with_suffix(f".{split}.bin"), "wb") as file:
            for start in range(0, len(texts), _BATCH):
                tokens, more = tokenizer.encode_joined(texts[start : start + _BATCH])
                file.write(tokens.astype(dtype).tobytes())
                lengths += more
        write_documents(stem.with_suffix(f".{split}.zst"), documents)
        text_bytes = [len(text.encode()) for text in texts]
        sizes = np.array([lengths, text_bytes], np.int64)
        write_array(stem.with_suffix(f".{split}.sizes.npy"), sizes)


def write_copies(stem: Path) -> None:
    """Write the dropped documents of a shard (.copies.zst)."""
    write_documents(stem.with_suffix(".copies.zst"), read_chosen(stem, DOCUMENT_DROPPED))


class JoinedShards(NamedTuple):
    """Both splits, and what each shard has in them."""

    splits: dict[SplitName, Split]
    sizes: dict[SplitName, list[PartSize]]


def join_shards(stems: list[Path], folder: Path) -> JoinedShards:
    """Concatenate what `encode_shard` and `write_copies` wrote, in a new FOLDER:
    {train,val}.{bin,idx}, documents.jsonl.zst and copies.jsonl.zst."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    splits = dict[SplitName, Split]()
    of_shards = dict[SplitName, list[PartSize]]()
    with open_own(folder / DOCUMENTS, "wb") as documents:
        for split in SPLITS:
            token_file = folder / f"{split}.bin"
            with open_own(token_file, "wb") as tokens:
                for stem in stems:
                    tokens.write(stem.with_suffix(f".{split}.bin").read_bytes())
                    documents.write(stem.with_suffix(f".{split}.zst").read_bytes())
            sizes = [np.load(stem.with_suffix(f".{split}.sizes.npy")) for stem in stems]
            of_shards[split] = [_sum_sizes(*size) for size in sizes]
            lengths, text_bytes = np.hstack(sizes)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            index_file = folder / f"{split}.idx"
            with open_own(index_file, "wb") as index:
                index.write(offsets.astype("<i8").tobytes())
            splits[split] = Split(
                tokens=int(offsets[-1]),
                documents=len(lengths),
                text_bytes=int(text_bytes.sum()),
                token_checksums=checksums_of(token_file),
                offset_checksums=checksums_of(index_file),
            )
    with open_own(folder / COPIES, "wb") as copies:
        for stem in stems:
            copies.write(stem.with_suffix(".copies.zst").read_bytes())
    return JoinedShards(splits, of_shards)


def _sum_sizes(lengths: npt.NDArray[np.int64], text_bytes: npt.NDArray[np.int64]) -> PartSize:
    return PartSize(
        tokens=int(lengths.sum()), documents=len(lengths), text_bytes=int(text_bytes.sum())
    )
