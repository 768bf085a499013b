"""From a source to a prepared corpus: spool, find duplicates, split, train the tokenizer, encode,
join, rename."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from farspan.corpus import dedup, shard_stages
from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.distinct_texts import CLUSTERS, Text, distinct_texts, read_distinct
from farspan.corpus.documents import COPIES, DOCUMENTS, write_array
from farspan.corpus.entropy import ngram_entropies
from farspan.corpus.mixture import OpenedSources, open_sources
from farspan.corpus.reading import CHUNK_BYTES, UNKNOWN_ENCODING
from farspan.corpus.rows import lacks_text
from farspan.corpus.sources import Source
from farspan.corpus.split import decide_split
from farspan.corpus.token_files import is_whole, verify_corpus
from farspan.domain.config import DataConfig, NamedPart, TokenizerConfig
from farspan.domain.corpus import (
    SPLITS,
    TOKEN_FILES,
    CorpusManifest,
    CorpusPart,
    Document,
    PartSize,
    Skipped,
    SplitName,
    by_kind,
)
from farspan.domain.escapes import shell_word, yaml_word
from farspan.domain.own_files import open_own, refuse_link
from farspan.domain.problems import Refusal, command
from farspan.domain.struct_files import content_hash, is_content_hash, load, save, write_atomically
from farspan.domain.units import counted, format_bytes, format_count, parse_fraction

#: Part of every hash: raise it when the same input gives other files than before.
_FORMAT = "3"
#: Text a tokenizer is trained on; more changes merges little and costs memory.
_SAMPLE_BYTES = 16 << 20
#: Disk needed for each byte of text: shards 0.3, shingles 0.7, tokens twice 0.6 each, documents
#: twice 0.3 each.
_DISK_FACTOR = 3
#: Work that was refused or interrupted is gone on with at the next try; what nobody has tried for
#: so long is given up.
_ABANDONED_S = 7 * 86_400

#: All that the folder of a prepared corpus holds.
CORPUS_FILES = ("corpus.json", "tokenizer.json", DOCUMENTS, COPIES, CLUSTERS, *TOKEN_FILES)

WriteLine = Callable[[str], None]


def auto_vocab(text_bytes: int) -> int:
    """Return 4,096 tokens below 4 MiB of text, doubled for every eightfold: 8,192 to 32 MiB, and so
    on to 65,536."""
    limits = (4 << 20, 32 << 20, 256 << 20, 2 << 30)
    steps = sum(text_bytes >= limit for limit in limits)
    return 4096 << steps


def prepare_corpus(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    root: Path,
    *,
    workers: int,
    write_line: WriteLine,
    verified: bool = False,
) -> tuple[Path, CorpusManifest]:
    """Make, or find, the corpus of `data` under `root`; the folder's name is the manifest's hash.

    `workers` processes share the work and change nothing in the result. A corpus that lacks files
    is made again; with `verified` also one with a block of other bytes than were prepared. Refuses
    what cannot be read, a corpus that is empty or whose validation split would be, a tokenizer that
    does not fit, and a disk with too little room.
    """
    source = open_sources(data)
    key = _corpus_key(source, data, tokenizer)
    if prepared := _find_prepared(root, key, write_line, verified=verified):
        if data.bad == "refuse":
            _refuse_bad(prepared[1].skipped, data)
        return prepared
    root.mkdir(parents=True, exist_ok=True)
    work = root / f".work-{key}"
    refuse_link(work)
    work.mkdir(exist_ok=True)
    os.utime(work)  # Before the sweep, which takes work of old: this is gone on with.
    _remove_abandoned(root, time.time())
    _require_space(root, source.size_bytes)
    with _lock_folder(work, write_line):
        # Another process may have made it meanwhile.
        prepared = _find_prepared(root, key, drop_message, verified=verified)
        if prepared is None:
            prepared = _build_corpus(source, data, tokenizer, work, workers, write_line)
            pointer = root / f".key-{key}"
            write_atomically(pointer, prepared[1].hash.encode())
    shutil.rmtree(work, ignore_errors=True)
    return prepared


def drop_message(line: str) -> None:
    """Drop a progress message."""


def read_text(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    digest: str,
    root: Path,
    *,
    workers: int,
    write_line: WriteLine,
) -> Text:
    """Read every text that the source of the corpus with this hash holds today, copies too, split
    as a corpus is.

    Where the source is as it was, this is the corpus's own text; `data.replay` is left out. Refuses
    what cannot be read.
    """
    if data.replay is not None:
        return read_source(data.without_replay(), root, workers=workers, write_line=write_line)
    source = open_sources(data)
    fingerprint = source.fingerprint()
    known = _find_prepared(root, _corpus_key(source, data, tokenizer), drop_message)
    if known is not None and known[1].hash == digest:
        prepared, manifest = known
        for kinds in manifest.skipped_kinds:
            write_line(f"skipped {kinds}")
        return read_distinct(prepared, manifest, fingerprint)
    write_line("the text has changed since the corpus was made, or the corpus is gone")
    return _read_source(source, data, root, workers, write_line)


def read_source(data: DataConfig, root: Path, *, workers: int, write_line: WriteLine) -> Text:
    """Read every text that a source holds today, copies too, split as a corpus is.

    No tokenizer is needed. Refuses what cannot be read.
    """
    return _read_source(open_sources(data), data, root, workers, write_line)


def _read_source(
    source: OpenedSources, data: DataConfig, root: Path, workers: int, write_line: WriteLine
) -> Text:
    fingerprint = source.fingerprint()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".text-") as folder:
        work = Path(folder)
        shards = _spool_source(source, data, work, write_line)
        stems = [work / f"{number:05}" for number in range(len(shards))]
        for skipped in by_kind(source.skipped()):
            write_line(f"skipped {skipped}")
        shard_stages.each_shard(dedup.sign, [(stem,) for stem in stems], workers)
        parts = [shard.part for shard in shards]
        decision = decide_split(stems, data, must_split=False, parts=parts)
        # A corpus numbers its documents in this order.
        documents = list(_chosen_of(stems, shard_stages.TRAIN))
        train = len(documents)
        documents += _chosen_of(stems, shard_stages.VAL)
        kept = len(documents)
        documents += _chosen_of(stems, shard_stages.DOCUMENT_DROPPED)
    clusters = decision.corpus_clusters().tolist()
    return distinct_texts(documents, clusters, train=train, kept=kept, fingerprint=fingerprint)


def _chosen_of(stems: list[Path], fate: int) -> Iterator[Document]:
    for stem in stems:
        yield from shard_stages.read_chosen(stem, fate)


def _corpus_key(source: OpenedSources, data: DataConfig, tokenizer: TokenizerConfig) -> str:
    fingerprint = source.fingerprint()
    share = parse_fraction(data.val)
    digest = _file_digest(tokenizer.use) if tokenizer.use else tokenizers.SPLITTING_RULE
    return content_hash(_FORMAT, fingerprint, share, data.dedup, tokenizer, digest)


def _build_corpus(
    source: OpenedSources,
    data: DataConfig,
    config: TokenizerConfig,
    work: Path,
    workers: int,
    write_line: WriteLine,
) -> tuple[Path, CorpusManifest]:
    tokenizer_file = work / "tokenizer.json"
    final = work / "final"
    if config.use:
        _copy_tokenizer(config.use, config.vocab, tokenizer_file)
    shards = _spool_source(source, data, work, write_line)
    stems = [work / f"{number:05}" for number in range(len(shards))]
    jobs = [(stem,) for stem in stems]
    shard_stages.each_shard(dedup.sign, jobs, workers)
    parts = [shard.part for shard in shards]
    decision = decide_split(stems, data, must_split=True, parts=parts)
    if decision.exact or decision.near:
        write_line(
            f"searched, not trained on: {decision.exact:,} exact and "
            f"{counted(decision.near, 'near duplicate')}"
        )
    if not config.use:
        text_bytes = sum(shard.text_bytes for shard in shards)
        vocab = auto_vocab(text_bytes) if config.vocab == "auto" else config.vocab
        write_line(f"training a tokenizer of {vocab:,} tokens")
        # Shards spread over the corpus that hold about _SAMPLE_BYTES.
        stride = -(-text_bytes // _SAMPLE_BYTES)
        shard_stages.each_shard(learn, [(tokenizer_file, vocab, stems[::stride])], workers)
    words = tokenizers.load_tokenizer(tokenizer_file)
    vocab_size = words.vocab_size
    if config.use and config.vocab != "auto":
        vocab_size = config.vocab
    write_line(f"encoding with {words.engine}, vocabulary {vocab_size:,}")
    shard_stages.each_shard(
        shard_stages.encode_shard, [(stem, tokenizer_file) for stem in stems], workers
    )
    shard_stages.each_shard(shard_stages.write_copies, jobs, workers)
    joined = shard_stages.join_shards(stems, final)
    write_array(final / CLUSTERS, decision.corpus_clusters())
    words.save(final / "tokenizer.json")
    dtype = shard_stages.token_dtype(words.vocab_size)
    train = np.memmap(final / "train.bin", dtype, "r")
    val = np.memmap(final / "val.bin", dtype, "r")
    unigram, bigram = ngram_entropies(train, val, vocab_size)
    # The end of text is not in tokenizer.json: two tokenizers may differ in nothing else.
    shard_digests = [shard.digest for shard in shards]
    coded = (_file_digest(tokenizer_file), vocab_size, words.end_of_text)
    digest = content_hash(_FORMAT, shard_digests, decision.digest, *coded)
    mixture = _describe_parts(source, parts, joined) if source.is_mixture else msgspec.UNSET
    if mixture:
        digest = content_hash(digest, mixture)
    dtype_name: Literal["uint16", "uint32"] = "uint16" if dtype.itemsize == 2 else "uint32"
    skipped = source.skipped()
    recoded = source.recoded() or msgspec.UNSET
    train_split = joined.splits["train"]
    val_split = joined.splits["val"]
    manifest = CorpusManifest(
        hash=digest,
        source=data.line,
        vocab_size=vocab_size,
        end_of_text=words.end_of_text,
        dtype=dtype_name,
        train=train_split,
        val=val_split,
        unigram_nats=unigram,
        bigram_nats=bigram,
        exact_duplicates=decision.exact,
        near_duplicates=decision.near,
        skipped=skipped,
        recoded=recoded,
        parts=mixture,
    )
    save(manifest, final / "corpus.json")
    folder = work.parent / manifest.hash
    if folder.exists() and not _is_sound(folder, manifest):
        # Moved aside first: the folder is whole or not there. Who has it mapped keeps its files.
        os.replace(folder, work / "damaged")
    if not folder.exists():
        os.replace(final, folder)
    return folder, manifest


def _describe_parts(
    source: OpenedSources, part_of: list[int], joined: shard_stages.JoinedShards
) -> tuple[CorpusPart, ...]:
    """Sum up the documents and tokens of each source in both splits. Refuses a source without
    either."""
    described = []
    for number, part in enumerate(source.parts):
        sizes = dict[SplitName, PartSize]()
        for split in SPLITS:
            of_shards = zip(part_of, joined.sizes[split], strict=True)
            own = [size for shard_part, size in of_shards if shard_part == number]
            sizes[split] = PartSize(
                tokens=sum(size.tokens for size in own),
                documents=sum(size.documents for size in own),
                text_bytes=sum(size.text_bytes for size in own),
            )
        if not sizes["train"].documents or not sizes["val"].documents:
            raise _refuse_empty_part(part, sizes)
        described.append(
            CorpusPart(name=part.name, source=part.source, replay=part.replay, **sizes)
        )
    return tuple(described)


def _refuse_empty_part(part: NamedPart, sizes: dict[SplitName, PartSize]) -> Refusal:
    lacking = "to train on" if not sizes["train"].documents else "to validate on"
    return Refusal(
        "no-documents",
        what="a source of the mixture holds too little text that the others do not hold",
        where=part.source,
        fact=f"after copies are left out, {part.name!r} has nothing {lacking}",
        remedy="leave this source out, or write in run.yaml: data: {dedup: false}",
    )


def _is_sound(folder: Path, manifest: CorpusManifest) -> bool:
    """Check that a folder holds every byte of a corpus that was just made."""
    if not _has_all_files(folder):
        return False
    try:
        verify_corpus(folder, manifest)
        return load(folder / "corpus.json", CorpusManifest).hash == manifest.hash
    except Refusal:
        return False


def _has_all_files(folder: Path) -> bool:
    return all((folder / name).is_file() for name in CORPUS_FILES)


def _copy_tokenizer(where: str, vocab: int | Literal["auto"], tokenizer_file: Path) -> None:
    """Copy the tokenizer that the user names; refuses ids beyond the vocabulary that the user
    gives."""
    words = tokenizers.load_tokenizer(where)
    if vocab != "auto" and vocab < words.vocab_size:
        raise Refusal(
            "tokenizer-mismatch",
            what="the tokenizer has ids beyond the given vocabulary",
            where=where,
            fact=f"its largest id is {words.vocab_size - 1}, tokenizer.vocab is {vocab}",
            remedy=(
                f"write in run.yaml: tokenizer: {{use: {yaml_word(where)}, "
                f"vocab: {words.vocab_size:d}}}"
            ),
        )
    words.save(tokenizer_file)


def _spool_source(
    source: OpenedSources, data: DataConfig, work: Path, write_line: WriteLine
) -> list[shard_stages.FinishedShard]:
    """Spool the source; refuses one without text, and a disk too small for the rest of the work."""
    write_line(f"reading {data.line}")
    shards = shard_stages.spool_sources(source.sources, work)
    read = {shard.part for shard in shards}
    for part, opened in enumerate(source.sources):
        if part not in read:
            raise _nothing_read(opened, source.parts[part])
    if data.bad == "refuse":
        _refuse_bad(source.skipped(), data)
    text_bytes = sum(shard.text_bytes for shard in shards)
    documents = sum(shard.documents for shard in shards)
    many = f"{format_count(documents)} documents" if documents > 1 else "1 document"
    write_line(f"{many}, {format_bytes(text_bytes)} of text")
    _require_space(work, text_bytes)
    return shards


def _nothing_read(source: Source, part: NamedPart) -> Refusal:
    """Return the refusal of a source without text; where files are damaged, it asks to mend
    them."""
    kinds = by_kind(source.skipped.entries())
    kinds.sort(key=lambda kind: not kind.bad)
    is_bad = bool(kinds) and kinds[0].bad
    code = "source-unreadable" if is_bad else "no-documents"
    if is_bad and kinds[0].reason == UNKNOWN_ENCODING:
        code = "not-utf8"
    remedy = "name a folder that holds text files: farspan init FOLDER"
    if is_bad and kinds[0].reason == lacks_text(part.fields):
        remedy = (
            "name the columns that hold the text: "
            f"{command('prepare', '--set', 'data.fields.text=COLUMN')}"
        )
    elif is_bad:
        remedy = "mend or replace what is named, or name another folder: farspan init FOLDER"
    return Refusal(
        code,
        what="nothing in the source can be read" if is_bad else "the source holds no text",
        where=part.source,
        fact=f"no document has any text; skipped: {'; '.join(map(str, kinds[:3])) or 'nothing'}",
        remedy=remedy,
    )


def _refuse_bad(skipped: Iterable[Skipped | str], data: DataConfig) -> None:
    """Raise Refusal (source-unreadable) that counts and names what cannot be read, if anything."""
    bad = [entry for entry in skipped if isinstance(entry, Skipped) and entry.bad]
    if not bad:
        return
    raise Refusal(
        "source-unreadable",
        what="files or rows of the source cannot be read",
        where=data.line,
        fact="; ".join(map(str, by_kind(bad))),
        remedy=f"leave them out: {command('prepare', '--set', 'data.bad=skip')}",
        key="data.bad",
    )


def learn(tokenizer_file: Path, vocab_size: int, stems: list[Path]) -> None:
    """Train on the training documents of these shards; in a process of its own, whose memory goes
    with it."""
    texts = (document.text for document in _chosen_of(stems, shard_stages.TRAIN))
    tokenizers.train_bpe_tokenizer(texts, vocab_size).save(tokenizer_file)


def _find_prepared(
    root: Path, key: str, write_line: WriteLine, *, verified: bool = False
) -> tuple[Path, CorpusManifest] | None:
    """Find the corpus that `key` led to before, if it is still there and whole; with `verified`
    only where every block has the bytes that were prepared."""
    pointer = root / f".key-{key}"
    digest = pointer.read_text() if pointer.exists() else ""
    folder = root / digest
    if not is_content_hash(digest) or not folder.exists():
        return None
    if not _has_all_files(folder):
        write_line(f"the corpus in {folder} lacks files: preparing it again")
        return None
    try:
        manifest = load(folder / "corpus.json", CorpusManifest)
        if verified:
            verify_corpus(folder, manifest)
        elif not is_whole(folder, manifest):
            write_line(f"a token file in {folder} has another size: preparing the corpus again")
            return None
    except Refusal as refusal:
        problem = refusal.problem
        if problem.code == "unknown-key":  # A later version made it.
            raise
        write_line(f"{problem.where}: {problem.fact}: preparing the corpus again")
        return None
    return folder, manifest


@contextlib.contextmanager
def _lock_folder(work: Path, write_line: WriteLine) -> Iterator[None]:
    """Let one process at a time work in a folder; the lock goes with its process, however that
    ends."""
    with open_own(work / "lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            write_line("another process is preparing this corpus; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_abandoned(root: Path, now: float) -> None:
    """Remove what abandoned work has left: it is days old, and nobody holds its lock."""
    for work in root.glob(".work-*"):
        # Another process may be removing it; what cannot be removed is left.
        with contextlib.suppress(OSError):
            age_s = now - work.lstat().st_mtime
            if age_s > _ABANDONED_S and not work.is_symlink():
                with open_own(work / "lock", "ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(work)


def _require_space(folder: Path, text_bytes: int) -> None:
    """Refuse when the disk has too little room for the work on so much text."""
    free = shutil.disk_usage(folder).free
    need = _DISK_FACTOR * text_bytes
    if free < need:
        raise Refusal(
            "disk-full",
            what="the disk has too little room to prepare this corpus",
            where=folder,
            fact=f"{format_bytes(free)} free, about {format_bytes(need)} needed",
            remedy=f"free some space, largest folders last: du -xd1 {shell_word(folder)} | sort -n",
        )


def _file_digest(path: str | Path | None) -> str:
    """Hash a tokenizer file and the config next to it, or the JSON and text files of its folder.

    Empty for a hub id.
    """
    expanded = Path(path).expanduser() if path else None
    if expanded is None or not expanded.exists():
        return ""
    # A tokenizer file's end of text is named by the config beside it, where there is one.
    files = [expanded, expanded.with_name("tokenizer_config.json")]
    if expanded.is_dir():
        files = sorted(p for p in expanded.glob("*") if p.suffix in (".json", ".txt"))
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
