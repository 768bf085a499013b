"""The whole way from files to token files, against plain recomputation; interrupted, repeated, and
refused."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.corpus import prepare as module
from farspan.corpus import shard_stages, token_files
from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.documents import read_documents
from farspan.corpus.entropy import ngram_entropies
from farspan.corpus.prepare import auto_vocab, prepare_corpus
from farspan.corpus.token_files import TokenFile
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.corpus import CorpusManifest, Document, Skipped
from farspan.domain.problems import Problem, Refusal
from farspan.domain.struct_files import load
from tests.corpus.test_dedup import planted, true_jaccard
from tests.waiting import LIMIT_S

SMALL = TokenizerConfig(vocab=600)


def silent(line: str) -> None:
    """A say that nobody hears."""


def write(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04}.txt").write_text(text)
    return folder


def made(
    source: Path,
    root: Path,
    *,
    workers: int = 1,
    tokenizer: TokenizerConfig = SMALL,
    verified: bool = False,
    **data: Any,
) -> tuple[Path, CorpusManifest]:
    config = DataConfig(source=str(source), **{"val": "20%", **data})
    return prepare_corpus(
        config, tokenizer, root, workers=workers, write_line=silent, verified=verified
    )


def kept(folder: Path, split: str = "all") -> list[Document]:
    documents = list(read_documents(folder))
    train = load(folder / "corpus.json", CorpusManifest).train.documents
    return {"train": documents[:train], "val": documents[train:], "all": documents}[split]


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return planted(7, 240)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_stages, "SHARD_BYTES", 8_000)


def test_token_files_hold_every_kept_document_once(
    texts: list[str], tmp_path: Path, small_shards: None
) -> None:
    folder, manifest = made(write(tmp_path / "text", texts), tmp_path / "root")
    assert folder == tmp_path / "root" / manifest.hash
    words = tokenizers.load_tokenizer(folder)
    for split, counts in (("train", manifest.train), ("val", manifest.val)):
        file = TokenFile.open(folder, split, manifest)  # type: ignore[arg-type]
        documents = kept(folder, split)
        assert len(documents) == counts.documents == len(file.offsets) - 1 > 0
        assert counts.text_bytes == sum(len(document.text.encode()) for document in documents)
        for number, document in enumerate(documents):
            assert file.document(number).tolist() == [
                *words.encode(document.text),
                manifest.end_of_text,
            ]
            assert document.title == Path(document.origin).stem
        assert len(file.tokens) == counts.tokens == file.offsets[-1]
    found = [document.text for document in kept(folder)]
    assert len(found) == len(texts) - manifest.exact_duplicates - manifest.near_duplicates
    assert len(set(found)) == len(found) and set(found) <= set(texts)
    assert manifest.exact_duplicates == len(texts) - len(set(texts)) > 0


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_no_near_duplicates_across_the_split(seed: int, dedup: bool, tmp_path: Path) -> None:
    texts = planted(seed, 120)
    folder, manifest = made(write(tmp_path / "text", texts), tmp_path / "root", dedup=dedup)
    train, val = ([d.text for d in kept(folder, split)] for split in ("train", "val"))
    assert not [pair for pair in itertools.product(train, val) if true_jaccard(*pair) >= 0.8]
    if dedup:
        assert not [pair for pair in itertools.combinations(train, 2) if true_jaccard(*pair) >= 0.8]
    else:
        assert sorted(train + val) == sorted(texts)
        assert manifest.exact_duplicates == manifest.near_duplicates == 0


def test_the_split_is_by_content_not_by_order(texts: list[str], tmp_path: Path) -> None:
    shuffled = random.Random(0).sample(texts, len(texts))
    one, _ = made(write(tmp_path / "a", texts), tmp_path / "root", dedup=False)
    two, _ = made(write(tmp_path / "b", shuffled), tmp_path / "root", dedup=False)
    assert one != two
    for split in ("train", "val"):
        assert sorted(d.text for d in kept(one, split)) == sorted(d.text for d in kept(two, split))


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_validation_share_is_what_was_asked_for(share: float, tmp_path: Path) -> None:
    rng = random.Random(3)
    count = 3000
    lines = [" ".join(str(rng.randrange(10**9)) for _ in range(5)) for _ in range(count)]
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    _, manifest = made(tmp_path / "text.jsonl", tmp_path / "root", val=share)
    assert abs(manifest.val.documents - share * count) < 4 * math.sqrt(count * share * (1 - share))
    assert manifest.train.documents + manifest.val.documents == count


def test_workers_change_nothing_and_a_second_run_does_nothing(
    texts: list[str], tmp_path: Path, small_shards: None
) -> None:
    source = write(tmp_path / "text", texts)
    one, _ = made(source, tmp_path / "one", workers=1)
    two, manifest = made(source, tmp_path / "two", workers=2)
    assert one.name == two.name and digests(one) == digests(two)
    assert sorted(p.name for p in one.iterdir()) == [
        "clusters.npy",
        "copies.jsonl.zst",
        "corpus.json",
        "documents.jsonl.zst",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.bin",
        "train.idx",
        "val.bin",
        "val.idx",
    ]
    before = {path: path.stat().st_mtime_ns for path in two.iterdir()}
    said: list[str] = []
    again = prepare_corpus(
        DataConfig(source=str(source), val="20%"),
        SMALL,
        tmp_path / "two",
        workers=2,
        write_line=said.append,
    )
    assert again == (two, manifest) and said == []
    assert {path: path.stat().st_mtime_ns for path in two.iterdir()} == before
    os.utime(source / "0000.txt")  # another time, the same content
    assert made(source, tmp_path / "two")[0] == two
    (source / "0000.txt").write_text("another text altogether, of several words")
    assert made(source, tmp_path / "two")[0] != two
    assert made(source, tmp_path / "two", val="30%")[0] != two
    assert sum(p.is_dir() for p in (tmp_path / "two").iterdir()) == 3


@pytest.mark.parametrize("victim", ["encode_shard", "sign", "join_shards", "write_documents"])
def test_interrupted_work_is_resumed_where_it_was(
    victim: str,
    texts: list[str],
    tmp_path: Path,
    small_shards: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = write(tmp_path / "text", texts)
    expected, _ = made(source, tmp_path / "whole")
    owner = module.dedup if victim == "sign" else shard_stages
    original = getattr(owner, victim)
    calls = Counter[str]()

    def counted(*arguments: object) -> object:
        calls["all"] += 1
        if calls["all"] == 3 or (victim == "join_shards" and calls["all"] == 1):
            raise KeyboardInterrupt
        return original(*arguments)

    counted.__name__ = victim
    monkeypatch.setattr(owner, victim, counted)
    with pytest.raises(KeyboardInterrupt):
        made(source, tmp_path / "root")
    assert not [path for path in (tmp_path / "root").iterdir() if not path.name.startswith(".")]
    folder, manifest = made(source, tmp_path / "root")
    assert digests(folder) == digests(expected)
    assert manifest.hash == expected.name
    once = 1 if victim == "join_shards" else number_of_shards(texts)
    times = 4 if victim == "write_documents" else 1  # all that is read, then splits and copies
    assert calls["all"] - 1 == times * once, "finished shards are not done twice"
    assert (
        sorted(path.name for path in (tmp_path / "root").iterdir() if path.name.startswith(".work"))
        == []
    )


def number_of_shards(texts: list[str]) -> int:
    count = size = 0
    for text in texts:
        if size == 0:
            count += 1
        size += len(text.encode())
        size = 0 if size >= 8_000 else size
    return count


def test_abandoned_work_is_removed(texts: list[str], tmp_path: Path) -> None:
    root = tmp_path / "root"
    long_ago = time.time() - 30 * 86_400
    for name in (".work-old", ".work-held", ".work-young"):
        (root / name).mkdir(parents=True)
        (root / name / "00000.docs").write_bytes(b"x")
        (root / name / "lock").touch()
        if name != ".work-young":
            os.utime(root / name, (long_ago, long_ago))
    with (root / ".work-held" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made(write(tmp_path / "text", texts), root)
    assert sorted(path.name for path in root.glob(".work-*")) == [".work-held", ".work-young"]


def test_old_work_that_is_resumed_is_kept(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_shard(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_stages, "encode_shard", encode_shard)
    source = write(tmp_path / "text", texts)
    root = tmp_path / "root"
    long_ago = time.time() - 30 * 86_400
    with pytest.raises(KeyboardInterrupt):
        made(source, root)
    (work,) = root.glob(".work-*")
    os.utime(work, (long_ago, long_ago))
    before = (work / "00000.docs").stat()
    with pytest.raises(KeyboardInterrupt):
        made(source, root)
    after = (work / "00000.docs").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_killed_in_the_middle_leaves_nothing_that_looks_whole(
    texts: list[str], tmp_path: Path
) -> None:
    source = write(tmp_path / "text", texts)
    expected, _ = made(source, tmp_path / "whole")
    code = f"""
import os, farspan.corpus.prepare as p
from farspan.domain.config import DataConfig, TokenizerConfig
p.ngram_entropies = lambda *a: os._exit(9)
root = p.Path({str(tmp_path / "root")!r})
p.prepare_corpus(DataConfig(source={str(source)!r}, val="20%"), TokenizerConfig(vocab=600), root, workers=1, write_line=print)
"""  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 9
    assert not [path for path in (tmp_path / "root").iterdir() if not path.name.startswith(".")]
    folder, _ = made(source, tmp_path / "root")
    assert digests(folder) == digests(expected)


@pytest.mark.parametrize("source", ["pydocs", "text"])
def test_workers_end_with_a_prepare_that_is_killed(
    source: str, texts: list[str], tmp_path: Path
) -> None:
    """All processes hold the writing end of one pipe: reading it comes to an end when the last of
    them has ended."""
    write(tmp_path / "text", texts)
    code = f"""
import multiprocessing, os, signal, threading, time
from pathlib import Path
from farspan.corpus.prepare import prepare_corpus
from farspan.domain.config import DataConfig, TokenizerConfig

def kill():
    while not multiprocessing.active_children():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
prepare_corpus(DataConfig(source={source!r}, val="20%"), TokenizerConfig(vocab=600), Path("root"), workers=2, write_line=print)
"""  # noqa: E501
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.wait(LIMIT_S) == -signal.SIGKILL
            process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=60),
    st.lists(st.integers(0, 6), min_size=2, max_size=60),
)
def test_entropies_are_those_counted_by_hand(train: list[int], val: list[int]) -> None:
    vocab = 7
    singles = Counter(train)
    pairs = Counter(itertools.pairwise(train))
    p1 = {t: (singles[t] + 1) / (len(train) + vocab) for t in range(vocab)}
    unigram = -sum(math.log(p1[t]) for t in val) / len(val)
    bigram = min(
        -sum(
            math.log((pairs[a, b] + w * p1[b]) / (singles[a] + w))
            for a, b in itertools.pairwise(val)
        )
        / (len(val) - 1)
        for w in (3, 10, 30, 100, 300, 1000, 3000)
    )
    found = ngram_entropies(np.array(train, np.uint16), np.array(val, np.uint16), vocab)
    assert found == pytest.approx((unigram, bigram), rel=1e-9)


def test_a_given_tokenizer_is_used_and_kept(texts: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / "text", texts)
    # Of the texts' numbers no more tokens can be made: each digit is one.
    words = tokenizers.train_bpe_tokenizer(topics.values(), 400)
    words.save(tmp_path / "words.json")
    used = TokenizerConfig(use=str(tmp_path / "words.json"))
    folder, manifest = made(source, tmp_path / "root", tokenizer=used)
    assert manifest.vocab_size == 400
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "words.json").read_bytes()
    padded = TokenizerConfig(use=used.use, vocab=70_000)
    assert made(source, tmp_path / "root", tokenizer=padded)[1].vocab_size == 70_000
    small = TokenizerConfig(use=used.use, vocab=300)
    assert problem(source, tmp_path, tokenizer=small).code == "tokenizer-mismatch"
    assert not list((tmp_path / "refused").rglob("*.docs")), "refused before anything is read"


@pytest.mark.parametrize("named", ["", "tokenizer.json"])
def test_tokenizers_that_differ_in_the_end_of_text_alone_make_two_corpora(
    named: str, texts: list[str], tmp_path: Path
) -> None:
    source = write(tmp_path / "text", texts)
    folder = tmp_path / "words"
    folder.mkdir()
    tokenizers.train_bpe_tokenizer(texts, 400).save(folder / "tokenizer.json")
    config = TokenizerConfig(use=str(folder / named))
    _, before = made(source, tmp_path / "root", tokenizer=config)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    _, after = made(source, tmp_path / "root", tokenizer=config)
    assert after.end_of_text == tokenizers.load_tokenizer(folder).end_of_text != before.end_of_text
    assert after.hash != before.hash


def test_the_end_of_text_is_in_the_hash(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "text", texts)
    tokenizers.train_bpe_tokenizer(texts, 400).save(tmp_path / "tokenizer.json")
    config = TokenizerConfig(use=str(tmp_path / "tokenizer.json"))
    # What the files say of it does not count here, only the id itself.
    monkeypatch.setattr(module, "_file_digest", lambda path: "the same")
    _, before = made(source, tmp_path / "one", tokenizer=config)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    _, after = made(source, tmp_path / "two", tokenizer=config)
    assert after.hash != before.hash


def test_large_vocabularies_are_stored_in_four_bytes(texts: list[str], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for text in texts for word in text.split()})
    unused = ["</s>", *(f"unused {number}" for number in range(1, 70_000))]
    vocab = {word: number for number, word in enumerate([*unused, *words])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "big.json"))
    use = TokenizerConfig(use=str(tmp_path / "big.json"))
    folder, manifest = made(write(tmp_path / "text", texts), tmp_path / "root", tokenizer=use)
    assert (manifest.dtype, manifest.vocab_size) == ("uint32", 70_000 + len(words))
    first = next(read_documents(folder))
    expected = [70_000 + words.index(word) for word in first.text.split()]
    assert TokenFile.open(folder, "train", manifest).document(0).tolist() == [*expected, 0]


def test_auto_vocab_grows_with_the_corpus() -> None:
    assert [auto_vocab(size) for size in (10**5, 7_600_000, 10**8, 10**9, 10**10)] == [
        4096,
        8192,
        16384,
        32768,
        65536,
    ]


def test_a_folder_with_names_that_are_not_utf8(texts: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / "text", texts)
    try:
        (source / os.fsdecode(b"caf\xe9.txt")).write_text("coffee and cake " * 20)
        (source / os.fsdecode(b"caf\xe9.bin")).write_text("no text")
    except OSError:
        pytest.skip("waits for a file system that takes any bytes as a name")
    folder, manifest = made(source, tmp_path / "root")
    assert f"{source}/caf\ufffd.txt" in {document.origin for document in kept(folder)}
    assert manifest.skipped == (
        Skipped.file(f"{source}/caf\ufffd.bin", "not a kind of file that can be read"),
    )


def problem(source: object, tmp_path: Path, **settings: object) -> Problem:
    with pytest.raises(Refusal) as caught:
        made(Path(str(source)), tmp_path / "refused", **settings)  # type: ignore[arg-type]
    assert caught.value.problem.remedy
    assert (
        not list((tmp_path / "refused").glob("[!.]*")) if (tmp_path / "refused").exists() else True
    )
    return caught.value.problem


def test_prepare_refuses_empty_text_nothing_held_out_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = write(tmp_path / "empty", ["", "  \n"])
    assert problem(empty, tmp_path).code == "no-documents"
    letter = write(tmp_path / "letter", ["a"])
    found = problem(letter, tmp_path)
    assert (found.code, "add text" in found.remedy) == ("no-documents", True)
    few = write(
        tmp_path / "few", [f"document {word} says {word * 3}" for word in ("a", "b", "c", "d")]
    )
    found = problem(few, tmp_path, val="0%")
    assert found.code == "no-documents"
    share = found.remedy.rpartition("val: ")[2].rstrip("}")
    assert made(few, tmp_path / "mended", val=share)[1].val.documents == 1
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=100))
    found = problem(few, tmp_path)
    assert (found.code, "100 B free" in found.fact) == ("disk-full", True)


def cut_short(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(10)


def overwrite(folder: Path) -> None:
    with (folder / "val.bin").open("r+b") as file:
        file.write(bytes(50))


def lose_documents(folder: Path) -> None:
    (folder / "documents.jsonl.zst").unlink()


def lose_copies(folder: Path) -> None:
    (folder / "copies.jsonl.zst").unlink()


def lose_clusters(folder: Path) -> None:
    (folder / "clusters.npy").unlink()


def garble_manifest(folder: Path) -> None:
    (folder / "corpus.json").write_bytes(b"{")


DAMAGES = (cut_short, overwrite, lose_documents, lose_copies, lose_clusters, garble_manifest)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_corpus_is_prepared_again_with_the_same_bytes(
    texts: list[str], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    source = write(tmp_path / "text", texts)
    folder, manifest = made(source, tmp_path / "root")
    before = digests(folder)
    damage(folder)
    assert digests(folder) != before
    assert made(source, tmp_path / "root", verified=True) == (folder, manifest)
    assert digests(folder) == before
    token_files.verify_corpus(folder, manifest)


def test_a_corpus_whose_files_are_whole_is_found_without_being_read(
    texts: list[str], tmp_path: Path
) -> None:
    source = write(tmp_path / "text", texts)
    folder, manifest = made(source, tmp_path / "root")
    cut_short(folder)
    with pytest.raises(Refusal) as caught:
        TokenFile.open(folder, "train", manifest)
    assert caught.value.problem.code == "corpus-damaged"
    made(source, tmp_path / "root")
    overwrite(folder)
    damaged = digests(folder)
    assert made(source, tmp_path / "root") == (folder, manifest)
    assert digests(folder) == damaged
