"""From a source to a prepared corpus: spool, find duplicates, split, train the tokenizer, encode, join, rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.corpus import dedup, pack
from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.documents import read_lines
from farspan.corpus.entropy import entropies
from farspan.corpus.sources import Source, open_source
from farspan.corpus.tokenizer import Tokenizer
from farspan.corpus.tokens import TokenFile
from farspan.domain.codec import content_hash, load, save, write_atomically
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes, format_count, parse_fraction

#: Part of every hash: raise it when the same input gives other files than before.
_FORMAT = "1"
#: Text a tokenizer is trained on; more changes merges little and costs memory.
_SAMPLE_BYTES = 16 << 20
#: Disk needed for each byte of text: shards 0.3, shingles 0.7, tokens twice 0.6 each, documents twice 0.3 each.
_DISK_FACTOR = 3
_SKIPPED_SHOWN = 100


def auto_vocab(text_bytes: int) -> int:
    """4,096 tokens below 4 MiB of text, doubled for every eightfold: 8,192 to 32 MiB, and so on to 65,536."""
    steps = sum(text_bytes >= limit for limit in (4 << 20, 32 << 20, 256 << 20, 2 << 30))
    return 4096 << steps


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig, root: Path, *, workers: int, say: Callable[[str], None]
) -> tuple[Path, CorpusManifest]:
    """Make, or find, the corpus of `data` under `root`; the folder's name is the manifest's hash.

    `workers` processes share the work and change nothing in the result. Refuses what cannot be read, a corpus that
    is empty or whose validation split would be, a tokenizer that does not fit, and a disk with too little room.
    """
    val_share = _val_share(data)
    source = open_source(data.source)
    key = content_hash(_FORMAT, source.fingerprint(), val_share, data.dedup, tokenizer, _file_digest(tokenizer.use))
    if found := _known(root, key):
        return found
    pack.require_space(root, _DISK_FACTOR * source.size_bytes)
    work = root / f".work-{key}"
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work, say):
        if found := _known(root, key):
            return found
        try:
            result = _build(source, data, val_share, tokenizer, work, workers, say)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise pack.disk_full(work, "and a write failed; what is finished is kept") from error
            raise
        write_atomically(root / f".key-{key}", result[1].hash.encode())
    shutil.rmtree(work, ignore_errors=True)
    return result


def _build(
    source: Source, data: DataConfig, val_share: float, config: TokenizerConfig, work: Path, workers: int,
    say: Callable[[str], None],
) -> tuple[Path, CorpusManifest]:  # fmt: skip
    say(f"reading {data.source}")
    shards = pack.spool(source, work)
    text_bytes = sum(shard.text_bytes for shard in shards)
    if not shards:
        raise Refusal(
            "no-documents", what="the source holds no text", where=data.source,
            fact=f"no document with any text; skipped: {'; '.join(source.skipped[:3]) or 'nothing'}",
            remedy="name a folder that holds text files: farspan init FOLDER",
        )  # fmt: skip
    say(f"{format_count(sum(s.documents for s in shards))} documents, {format_bytes(text_bytes)} of text")
    pack.require_space(work, _DISK_FACTOR * text_bytes)
    stems = [work / f"{number:05}" for number in range(len(shards))]
    pack.each_shard(dedup.sign, [(stem,) for stem in stems], workers)
    exact, near, fates = _decide(stems, val_share, data)
    say(f"left out: {exact} exact and {near} near duplicates")
    tokenizer_file = work / "tokenizer.json"
    if config.use:
        tokenizers.load(config.use).save(tokenizer_file)
    else:
        vocab = auto_vocab(text_bytes) if config.vocab == "auto" else config.vocab
        say(f"training a tokenizer of {vocab:,} tokens")
        sample = stems[:: -(-text_bytes // _SAMPLE_BYTES)]
        pack.each_shard(learn, [(tokenizer_file, vocab, sample)], workers)
    words = tokenizers.load(tokenizer_file)
    vocab_size = _vocab_size(words, config)
    say(f"encoding with {words.engine}, vocabulary {vocab_size:,}")
    pack.each_shard(pack.encode_shard, [(stem, tokenizer_file) for stem in stems], workers)
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    splits = pack.join_shards(stems, final)
    words.save(final)
    manifest = CorpusManifest(
        hash=content_hash(_FORMAT, [s.digest for s in shards], fates, _file_digest(tokenizer_file), vocab_size),
        source=data.source, vocab_size=vocab_size, end_of_text=words.end_of_text,
        dtype="uint16" if words.vocab_size <= 1 << 16 else "uint32", train=splits["train"], val=splits["val"],
        unigram_nats=0.0, bigram_nats=0.0, exact_duplicates=exact, near_duplicates=near, skipped=_shown(source.skipped),
    )  # fmt: skip
    train, val = TokenFile.open(final, "train", manifest), TokenFile.open(final, "val", manifest)
    unigram, bigram = entropies(train.tokens, val.tokens, vocab_size)
    manifest = msgspec.structs.replace(manifest, unigram_nats=unigram, bigram_nats=bigram)
    save(manifest, final / "corpus.json")
    folder = work.parent / manifest.hash
    if not folder.exists():
        os.replace(final, folder)
    return folder, manifest


def _decide(stems: list[Path], val_share: float, data: DataConfig) -> tuple[int, int, str]:
    """Write each shard's fates (dropped, train or val); the numbers of exact and near duplicates left out, a digest.

    A document's split follows from the lowest text hash in its cluster of near duplicates: the same in any order.
    """
    shards = dedup.Shards(stems)
    first, keys = dedup.clusters(shards), shards.hashes()
    leaders = first == np.arange(len(first))
    exact = len(keys) - len(np.unique(keys)) if data.dedup else 0
    near = len(keys) - int(leaders.sum()) - exact if data.dedup else 0
    np.minimum.at(keys, first, keys)
    keys = keys[first]
    fates = np.where(keys < np.uint64(val_share * 2.0**64), np.uint8(pack.VAL), np.uint8(pack.TRAIN))
    if data.dedup:
        fates[~leaders] = pack.DROPPED
    _refuse_empty_split(fates, keys, data)
    for number, stem in enumerate(stems):
        np.save(stem.with_suffix(".fates.npy"), fates[shards.first[number] : shards.first[number + 1]])
    return exact, near, hashlib.sha256(fates.tobytes()).hexdigest()


def _refuse_empty_split(fates: npt.NDArray[np.uint8], keys: dedup.U64, data: DataConfig) -> None:
    for fate, name in ((pack.VAL, "validation"), (pack.TRAIN, "training")):
        if not np.any(fates == fate):
            distinct = np.unique(keys) / 2.0**64
            enough = f"{100 * (distinct[0] + distinct[1]) / 2:.3g}%" if len(distinct) > 1 else ""
            raise Refusal(
                "no-documents",
                what=f"the {name} part of this corpus would be empty",
                where=data.source,
                fact=f"{len(distinct)} distinct documents, of which {data.val} by hash are for validation",
                remedy=f"write in run.yaml: data: {{source: {data.source}, val: {enough}}}" if enough
                else f"cut the text in several documents: split -C 64k --additional-suffix=.txt {data.source} part-",
            )  # fmt: skip


def learn(tokenizer_file: Path, vocab_size: int, stems: list[Path]) -> None:
    """Train on the training documents of these shards; in a process of its own, whose memory goes with it."""
    tokenizers.train(_sample(stems), vocab_size).save(tokenizer_file)


def _sample(stems: list[Path]) -> Iterator[str]:
    """Training texts of these shards."""
    for stem in stems:
        fates = np.load(stem.with_suffix(".fates.npy"))
        documents = read_lines(stem.with_suffix(".docs"))
        yield from (d.text for d, fate in zip(documents, fates, strict=True) if fate == pack.TRAIN)


def _vocab_size(words: Tokenizer, config: TokenizerConfig) -> int:
    """What the model must have room for: the tokenizer's ids, or more where the user gave a larger number."""
    if config.use is None or config.vocab == "auto":
        return words.vocab_size
    if config.vocab < words.vocab_size:
        raise Refusal(
            "tokenizer-mismatch",
            what="the tokenizer has ids beyond the given vocabulary",
            where=config.use,
            fact=f"its largest id is {words.vocab_size - 1}, tokenizer.vocab is {config.vocab}",
            remedy=f"write in run.yaml: tokenizer: {{use: {config.use}, vocab: {words.vocab_size}}}",
        )
    return config.vocab


def _val_share(data: DataConfig) -> float:
    try:
        share = parse_fraction(data.val)
        if 0 < share < 1:
            return share
        fact = f"{data.val} leaves one of the two parts empty"
    except ValueError as error:
        fact = str(error)
    raise Refusal(
        "out-of-range", what="data.val is not a share of the corpus", where=data.source, fact=fact,
        remedy="write in run.yaml: data: {val: 5%}",
    )  # fmt: skip


def _known(root: Path, key: str) -> tuple[Path, CorpusManifest] | None:
    """The corpus that `key` led to before, if it is still there and whole."""
    pointer = root / f".key-{key}"
    if not pointer.exists() or not (folder := root / pointer.read_text()).exists():
        return None
    manifest = load(folder / "corpus.json", CorpusManifest)
    TokenFile.open(folder, "train", manifest)
    TokenFile.open(folder, "val", manifest)
    return folder, manifest


@contextlib.contextmanager
def _locked(work: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process at a time works in a folder; the lock goes with its process, however that ends."""
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is preparing this corpus; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _file_digest(path: str | Path | None) -> str:
    """Content of a tokenizer file or of the JSON and text files in its folder; empty for a hub id."""
    found = Path(path).expanduser() if path else None
    if found is None or not found.exists():
        return ""
    files = [found] if found.is_file() else sorted(p for p in found.glob("*") if p.suffix in (".json", ".txt"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _shown(skipped: list[str]) -> tuple[str, ...]:
    more = len(skipped) - _SKIPPED_SHOWN
    return (*skipped[:_SKIPPED_SHOWN], *([f"and {more} more"] if more > 0 else []))
