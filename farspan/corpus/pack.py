"""Stages that go shard by shard: spool a source to shards, encode a shard, join the shards to token files.

A shard is about SHARD_BYTES of text. Each stage writes its files beside the shard and one marker last, so that work
that was interrupted goes on after the last finished shard.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from farspan.corpus.documents import cut, read_lines, write_documents
from farspan.corpus.sources import Source
from farspan.corpus.tokenizer import load_cached
from farspan.domain.codec import load, save
from farspan.domain.corpus import Document, Split
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes

SHARD_BYTES = 4 << 20
#: Documents encoded at a time.
_BATCH = 64
#: What becomes of a document.
DROPPED, TRAIN, VAL = 0, 1, 2


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Marker of a finished shard of text: what it holds."""

    documents: int
    text_bytes: int
    digest: str


def spool(source: Source, work: Path) -> list[Shard]:
    """Write the source's documents, cleaned, to WORK/00000.docs and so on; finished shards are kept as they are."""
    shards: list[Shard] = []
    while (marker := work / f"{len(shards):05}.shard").exists():
        shards.append(load(marker, Shard))
    parts = (part for document in source.documents() for part in cut(document))
    rest = itertools.islice(parts, sum(shard.documents for shard in shards), None)
    for first in rest:
        stem = work / f"{len(shards):05}"
        shards.append(_write_shard(stem, itertools.chain([first], rest)))
        save(shards[-1], stem.with_suffix(".shard"))
    return shards


def _write_shard(stem: Path, documents: Iterator[Document]) -> Shard:
    """One shard's worth of documents taken from the stream."""
    digest, counts = hashlib.sha256(), [0, 0]

    def counted() -> Iterator[Document]:
        while counts[1] < SHARD_BYTES and (document := next(documents, None)) is not None:
            digest.update(msgspec.json.encode(document))
            counts[0] += 1
            counts[1] += len(document.text.encode())
            yield document

    with stem.with_suffix(".docs").open("wb") as file:
        write_documents(file, counted(), level=1)
    return Shard(documents=counts[0], text_bytes=counts[1], digest=digest.hexdigest())


def each_shard(function: Callable[..., None], jobs: list[tuple[Any, ...]], workers: int) -> None:
    """Call `function(stem, ...)` for every job, in `workers` spawned processes; those done before are left alone."""
    run = functools.partial(_once, function)
    if workers == 1:
        for job in jobs:
            run(*job)
        return
    processes = min(workers, len(jobs))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start_helper) as pool:
        try:
            list(pool.map(run, *zip(*jobs, strict=True)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start_helper() -> None:
    """In a worker: the processes are the parallelism, so `tokenizers` starts no threads of its own; and it ends with
    its parent, however that ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _once(function: Callable[..., None], stem: Path, *rest: object) -> None:
    marker = stem.with_suffix(f".{function.__name__}.done")
    if not marker.exists():
        function(stem, *rest)
        marker.touch()


def encode_shard(stem: Path, tokenizer_file: Path) -> None:
    """Encode the kept documents: STEM.train.bin, .train.lengths.npy, .train.zst; the same for val; STEM.counts."""
    tokenizer = load_cached(tokenizer_file)
    fates = np.load(stem.with_suffix(".fates.npy"))
    counts = {}
    for split, fate in (("train", TRAIN), ("val", VAL)):
        documents = [d for d, f in zip(read_lines(stem.with_suffix(".docs")), fates, strict=True) if f == fate]
        lengths: list[int] = []
        with stem.with_suffix(f".{split}.bin").open("wb") as file:
            for start in range(0, len(documents), _BATCH):
                texts = [document.text for document in documents[start : start + _BATCH]]
                tokens, more = tokenizer.encode_joined(texts)
                file.write(tokens.astype(token_dtype(tokenizer.vocab_size)).tobytes())
                lengths += more
        np.save(stem.with_suffix(f".{split}.lengths.npy"), np.array(lengths, np.int64))
        with stem.with_suffix(f".{split}.zst").open("wb") as file:
            write_documents(file, documents, level=1)
        text_bytes = sum(len(document.text.encode()) for document in documents)
        counts[split] = Split(tokens=sum(lengths), documents=len(documents), text_bytes=text_bytes)
    save(counts, stem.with_suffix(".counts"))


def token_dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def join_shards(stems: list[Path], folder: Path) -> dict[str, Split]:
    """Concatenate what `encode_shard` wrote to FOLDER/train.bin, train.idx, val.bin, val.idx, documents.jsonl.zst."""
    counts = [load(stem.with_suffix(".counts"), dict[str, Split]) for stem in stems]
    with (folder / "documents.jsonl.zst").open("wb") as documents:
        for split in ("train", "val"):
            offset = 0
            with (folder / f"{split}.bin").open("wb") as tokens, (folder / f"{split}.idx").open("wb") as index:
                index.write(np.zeros(1, "<i8").tobytes())
                for stem in stems:
                    _append(stem.with_suffix(f".{split}.bin"), tokens)
                    _append(stem.with_suffix(f".{split}.zst"), documents)
                    ends = offset + np.cumsum(np.load(stem.with_suffix(f".{split}.lengths.npy")))
                    index.write(ends.astype("<i8").tobytes())
                    offset = int(ends[-1]) if len(ends) else offset
    return {
        split: Split(
            tokens=sum(c[split].tokens for c in counts),
            documents=sum(c[split].documents for c in counts),
            text_bytes=sum(c[split].text_bytes for c in counts),
        )
        for split in ("train", "val")
    }


def _append(path: Path, target: object) -> None:
    with path.open("rb") as file:
        shutil.copyfileobj(file, target, 1 << 20)  # type: ignore[arg-type]


def require_space(folder: Path, need_bytes: int) -> None:
    """Refuse when the disk that `folder` will lie on has less than `need_bytes` free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if shutil.disk_usage(there).free < need_bytes:
        raise disk_full(there, f"about {format_bytes(need_bytes)} needed")


def disk_full(there: Path, fact: str) -> Refusal:
    return Refusal(
        "disk-full",
        what="the disk has too little room to prepare this corpus",
        where=there,
        fact=f"{format_bytes(shutil.disk_usage(there).free)} free, {fact}",
        remedy=f"free some space, largest folders last: du -xd1 {there} | sort -n",
    )
