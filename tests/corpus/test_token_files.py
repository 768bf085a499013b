"""What tells one host's token files from another's, and damaged ones from those that were
prepared."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.corpus import find_prepared, token_files
from farspan.corpus.token_files import TokenFile, VerifiedArray, checksums_of, split_fingerprint
from farspan.domain.corpus import BLOCK_BYTES, SENT, CorpusManifest, token_file_sizes
from farspan.domain.problems import Problem, Refusal
from farspan.domain.struct_files import load, to_json
from farspan.domain.train import TrainSpec
from farspan.runtime.worker import train_windows
from tests import tiny

#: Tokens of a split with seven blocks, the last of them not whole.
MANY = 6 * BLOCK_BYTES // 2 + 777


def test_whichever_token_differs_the_fingerprint_does():
    random = np.random.default_rng(0)
    ours = random.integers(0, 2**16, 5000, dtype=np.uint16)
    assert split_fingerprint(ours.copy()) == split_fingerprint(ours)
    for place in (0, 4999, *random.integers(5000, size=50)):
        other = ours.copy()
        other[place] ^= 1
        assert split_fingerprint(other) != split_fingerprint(ours)
    assert split_fingerprint(ours[:-1]) != split_fingerprint(ours)


def test_of_large_files_evenly_spaced_blocks_are_read(monkeypatch):
    monkeypatch.setattr(token_files, "FINGERPRINT_BLOCKS", 4)
    monkeypatch.setattr(token_files, "FINGERPRINT_BLOCK_BYTES", 10)
    ours = np.zeros(100, np.uint8)
    read = [
        place
        for place in range(100)
        if split_fingerprint(ours) != split_fingerprint((np.arange(100) == place).view(np.uint8))
    ]
    assert read == [start + i for start in (0, 25, 50, 75) for i in range(10)]


# -- blocks that are verified when they are first read


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus whose blocks have checksums."""
    folder = tmp_path_factory.mktemp("whole") / "corpus"
    tiny.corpus(folder, tokens=MANY, documents=5000, verified=True)
    return folder


def damaged(whole: Path, folder: Path, name: str, at: int, count: int = 4000) -> CorpusManifest:
    """A copy of a corpus in which bytes of one file are another program's."""
    shutil.copytree(whole, folder)
    content = bytearray((whole / name).read_bytes())
    content[at : at + count] = bytes(byte ^ 0xA5 for byte in content[at : at + count])
    (folder / name).write_bytes(content)
    return load(folder / "corpus.json", CorpusManifest)


def problem_of(read: object, *arguments: object) -> Problem:
    assert callable(read)
    with pytest.raises(Refusal) as caught:
        read(*arguments)
    return caught.value.problem


def test_a_manifest_with_checksums_is_saved_and_loaded_and_shown_without_them(whole: Path) -> None:
    manifest = load(whole / "corpus.json", CorpusManifest)
    assert len(manifest.train.token_checksums) == 7 * token_files.CHECKSUM_BYTES
    assert b"checksums" not in to_json(manifest.without_checksums())
    assert token_file_sizes(manifest) == [
        (whole / name).stat().st_size for name in ("train.bin", "train.idx", "val.bin", "val.idx")
    ]


@given(data=st.data())
def test_a_slice_is_what_the_file_holds_or_a_refusal_where_a_block_of_it_is_damaged(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, data: st.DataObject
) -> None:
    values = np.fromfile(whole / "train.bin", "<u2")
    bad = data.draw(st.sets(st.integers(0, 6)), "damaged blocks")
    changed = values.copy()
    for block in bad:
        place = data.draw(
            st.integers(block * BLOCK_BYTES // 2, min((block + 1) * BLOCK_BYTES // 2, MANY) - 1)
        )
        changed[place] ^= 1 << data.draw(st.integers(0, 15))
    array = VerifiedArray(changed, checksums_of(whole / "train.bin"), whole / "train.bin")
    for _ in range(5):
        start = data.draw(st.integers(0, MANY - 1))
        stop = data.draw(st.integers(start + 1, MANY))
        touched = range(2 * start // BLOCK_BYTES, (2 * stop - 1) // BLOCK_BYTES + 1)
        if first := sorted(bad.intersection(touched)):
            problem = problem_of(array.__getitem__, slice(start, stop))
            assert f"the block at byte {first[0] * BLOCK_BYTES} " in problem.fact
            assert (problem.code, problem.where) == ("corpus-damaged", str(whole / "train.bin"))
        else:
            assert np.array_equal(array[start:stop], values[start:stop])
            assert array[stop - 1] == values[stop - 1]
    assert len(array) == MANY and np.array_equal(array.unverified, changed)


def test_a_block_is_hashed_once(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[int]()

    def counting(block: memoryview) -> bytes:
        hashed.append(len(block))
        return checksum(block)

    checksum = token_files.block_checksum
    monkeypatch.setattr(token_files, "block_checksum", counting)
    file = TokenFile.open(whole, "train", load(whole / "corpus.json", CorpusManifest))
    for _ in range(3):
        for start in range(0, MANY, 100):
            file.tokens[start : start + 101]
    assert hashed == [BLOCK_BYTES] * 6 + [2 * 777]


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "val.bin", "val.idx"])
def test_every_file_is_verified_in_full_on_request(whole: Path, tmp_path: Path, name: str) -> None:
    size = (whole / name).stat().st_size
    manifest = damaged(whole, tmp_path / "copy", name, size // 2, min(4000, size // 2))
    problem = problem_of(token_files.verify_corpus, tmp_path / "copy", manifest, "mend it")
    assert problem.where == str(tmp_path / "copy" / name)
    assert problem.remedy == "mend it"
    token_files.verify_corpus(whole, manifest)


def test_damaged_document_ends_are_noticed_where_documents_are_reshuffled(
    whole: Path, tmp_path: Path
) -> None:
    manifest = damaged(whole, tmp_path / "copy", "train.idx", 8 * 3000, 8)
    file = TokenFile.open(tmp_path / "copy", "train", manifest)
    plain = TrainSpec(steps=1, batch=1, seq_len=16, precision="fp32", validate_every=1, seed=0)
    train_windows(file, plain, manifest)
    reshuffled = msgspec.structs.replace(
        plain, regularization=msgspec.structs.replace(plain.regular, reshuffle=True)
    )
    assert problem_of(train_windows, file, reshuffled, manifest).code == "corpus-damaged"


def test_a_damaged_copy_that_another_host_sent_counts_as_none(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / f"{SENT}{tiny.CORPUS_HASH}"
    manifest = damaged(whole, copy, "train.bin", 20_000)
    assert find_prepared.is_corpus(copy, tiny.CORPUS_HASH)
    assert problem_of(token_files.verify_corpus, copy, manifest).code == "corpus-damaged"
    assert not find_prepared.is_corpus(copy, tiny.CORPUS_HASH)


def test_a_corpus_of_an_earlier_version_is_read_as_it_is(whole: Path, tmp_path: Path) -> None:
    manifest = damaged(whole, tmp_path / "copy", "train.bin", 20_000).without_checksums()
    file = TokenFile.open(tmp_path / "copy", "train", manifest)
    assert np.array_equal(file.tokens[:], np.fromfile(tmp_path / "copy" / "train.bin", "<u2"))
