"""An index with a ready encoder's vectors: words answer first, only new passages are embedded, an
encoder that is gone or changed is never mixed with another."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.retrieval import encoder_voice
from farspan.retrieval.build import build
from farspan.retrieval.chunk import chunk_document
from farspan.retrieval.encoder_voice import EncoderModel, MissingEncoder
from farspan.retrieval.encoders.encoder import Encoder
from farspan.retrieval.encoders.opening import open_encoder
from farspan.retrieval.hybrid_ranking import DEPTH, Mix
from farspan.retrieval.index import (
    ENCODER_VECTORS,
    EncoderIdentity,
    Index,
    IndexManifest,
    NoModels,
    Recipe,
)
from farspan.retrieval.index_task import Task
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.kept_vectors import KeptVectors
from farspan.retrieval.search import search, similar
from farspan.retrieval.stores import Vectors
from tests.retrieval.encoder_folders import WORDS, write_bert

#: Words that the encoder knows.
KNOWN = [word for word in WORDS if word.isalpha() and len(word) > 2]
TRAIN = 34


def make_documents(count: int) -> list[Document]:
    rng = random.Random(0)
    documents = []
    for number in range(count):
        lines = [" ".join(rng.choices(KNOWN, k=7)) for _ in range(2)]
        text = f"How {number} is opened at {lines[0]}.\n\n{lines[0]}.\n{lines[1]} of {number}."
        documents.append(
            Document(title=f"{rng.choice(KNOWN)}.{number}", text=text, origin=f"{number}.txt")
        )
    return documents


DOCUMENTS = make_documents(40)
NEW = Document(title="quokka", text="A quokka.\n\nHow to open the quokka file.", origin="new.txt")


class Counting:
    """A real encoder that counts the passages that it embeds, and can be stopped at one."""

    def __init__(self, encoder: Encoder, stop_at: int | None = None) -> None:
        self._encoder = encoder
        self._stop_at = stop_at
        self.passages_of: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._encoder, name)

    def passages(
        self, texts: Sequence[str], work: IndexWork | None = None, device: str = "auto"
    ) -> Vectors:
        if self._stop_at is not None and len(self.passages_of) >= self._stop_at:
            raise KeyboardInterrupt
        self.passages_of += texts
        return self._encoder.passages(texts, work, device)


class Here(NoModels):
    """The encoder is on this machine."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encoder(self, identity: EncoderIdentity) -> Encoder | None:
        return self._encoder if identity.id == self._encoder.id else None


@pytest.fixture(scope="module", autouse=True)
def small_tables() -> Iterator[None]:
    """Tables of queries are fitted to few texts: their quality is not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_voice, "MIN_TEXTS", 200)
        patch.setattr(encoder_voice, "TEXTS_PER_PASSAGE", 1)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "small"
    folder.mkdir()
    write_bert(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return open_encoder(folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """An encoder of the same shape with another pooling."""
    folder = tmp_path_factory.mktemp("other") / "small"
    folder.mkdir()
    write_bert(folder, pooling={"pooling_mode_cls_token": True})
    return open_encoder(folder)


def identity(encoder: Encoder) -> EncoderIdentity:
    return EncoderIdentity(id=encoder.id, name=encoder.name, folder=str(encoder.folder))


def make(
    path: Path,
    encoder: Encoder | None,
    documents: Sequence[Document] = DOCUMENTS,
    *,
    missing: EncoderIdentity | None = None,
    work: IndexWork | None = None,
    lines: list[str] | None = None,
    refit: bool = False,
    **recipe: object,
) -> IndexManifest:
    """Build an index by words and an encoder; `missing` is one that is not there."""
    voices: list[EncoderModel | MissingEncoder] = []
    if encoder is not None:
        voices.append(EncoderModel(encoder=encoder))
    if missing is not None:
        voices.append(MissingEncoder(missing))
    return build(
        Task(
            path=path,
            documents=documents,
            train=TRAIN,
            voices=voices,
            encoder=missing or (None if encoder is None else identity(encoder)),
            recipe=Recipe(**{"evaluate": False, **recipe}),
            write_line=(lines if lines is not None else []).append,
            work=work or IndexWork(),
            refit=refit,
        )
    )


def opened(path: Path, encoder: Encoder | None = None) -> Index:
    return Index.open(path, Here(encoder) if encoder else NoModels(), remedy="farspan index X")


def check(path: Path, encoder: Encoder, documents: Sequence[Document]) -> None:
    """The index is of exactly these documents, and its vectors are this encoder's."""
    index = opened(path, encoder)
    chunks = list(index.passages)
    cut = [
        chunk for n, document in enumerate(documents) for chunk in chunk_document(document, n, 128)
    ]
    assert [chunk.text for chunk in chunks] == [chunk.text for chunk in cut]
    ids = index.passages.rows_N["id"]
    assert index.stores[ENCODER_VECTORS].ids().tolist() == sorted(ids.tolist())
    stored = index.vectors(np.arange(len(chunks)), ENCODER_VECTORS)
    expected = encoder.passages([chunk.indexed for chunk in chunks])
    np.testing.assert_allclose(stored, expected, atol=2e-3)
    covariance = np.cov(expected, rowvar=False, bias=True)
    np.testing.assert_allclose(index.covariances[ENCODER_VECTORS], covariance, atol=1e-3)
    index.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, encoder: Encoder) -> Path:
    """An index that was measured, which no test changes."""
    path = tmp_path_factory.mktemp("whole") / "index"
    make(path, encoder, evaluate=True)
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "index"))


def test_index_records_its_encoder_and_how_well_it_searches(whole: Path, encoder: Encoder):
    index = opened(whole, encoder)
    manifest = index.manifest
    assert manifest.sets.keys() == {"encoder"} and manifest.origin is None
    assert manifest.encoder == identity(encoder) and manifest.no_encoder == ""
    assert manifest.about(ENCODER_VECTORS).model == encoder.id
    evaluation = manifest.evaluation
    assert evaluation is not None and evaluation.table_choice is not None
    systems = {"bm25", "encoder", "table", "fused", "fused by table"}
    assert all(set(kind.systems) == systems for kind in evaluation.kinds.values())
    index.close()
    check(whole, encoder, DOCUMENTS)


def test_words_answer_while_vectors_are_made(tmp_path: Path, encoder: Encoder):
    """A build that is stopped before the first vector leaves an index of words."""
    path = tmp_path / "index"
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        make(path, Counting(encoder, stop_at=0), lines=lines)
    assert "searches by words answer already; vectors follow" in lines
    index = opened(path)
    assert index.manifest.sets == {} and index.manifest.encoder is None
    answer = search(index, DOCUMENTS[3].title, 3)
    assert answer.system == "bm25" and answer.results[0].title == DOCUMENTS[3].title
    with pytest.raises(Refusal, match="usage"):
        search(index, "socket", system="encoder")
    index.close()
    # The same command goes on to the vectors.
    made = make(path, encoder)
    assert made.sets.keys() == {"encoder"}
    check(path, encoder, DOCUMENTS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


def test_build_that_was_stopped_embeds_nothing_twice(tmp_path: Path, encoder: Encoder):
    whole_work = IndexWork()
    make(tmp_path / "whole", encoder, work=whole_work, evaluate=True)
    path = tmp_path / "index"

    def stop(work: IndexWork) -> None:
        if work.embedded >= 60:
            raise KeyboardInterrupt

    stopped = IndexWork(changed=stop)
    with pytest.raises(KeyboardInterrupt):
        make(path, encoder, work=stopped, evaluate=True)
    assert opened(path).manifest.sets == {}
    resumed = IndexWork()
    made = make(path, encoder, work=resumed, evaluate=True)
    assert resumed.kept > 0
    assert resumed.embedded + resumed.kept == whole_work.embedded
    assert made.evaluation == opened(tmp_path / "whole").manifest.evaluation
    check(path, encoder, DOCUMENTS)


def test_only_new_passages_are_embedded(path: Path, encoder: Encoder):
    changed = msgspec.structs.replace(DOCUMENTS[5], text=DOCUMENTS[5].text + " Read it.")
    moved = msgspec.structs.replace(DOCUMENTS[6], origin="elsewhere.txt")
    documents = [NEW, *DOCUMENTS[:5], changed, moved, *DOCUMENTS[8:]]
    counting = Counting(encoder)
    lines: list[str] = []
    before = opened(path).manifest
    after = make(path, counting, documents, lines=lines)
    texts = [f"{document.title}\n{document.text}" for document in (NEW, changed)]
    assert counting.passages_of == texts
    assert lines[0] == "3 documents new or changed, 3 gone: 2 new passages"
    assert (after.fit, after.evaluation, after.lexical) == (
        before.fit,
        before.evaluation,
        before.lexical,
    )
    check(path, encoder, documents)
    index = opened(path, encoder)
    assert search(index, "quokka", 1).results[0].title == "quokka"
    index.close()


@pytest.mark.parametrize("seed", range(3))
def test_index_follows_any_changes_of_its_text(path: Path, encoder: Encoder, seed: int):
    rng = random.Random(seed)
    documents = list(DOCUMENTS)
    known = {f"{document.title}\n{document.text}" for document in documents}
    for turn in range(3):
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(documents))
            match rng.randrange(4):
                case 0:
                    documents.pop(at)
                case 1:
                    text = f"{documents[at].text} Read {turn}."
                    documents[at] = msgspec.structs.replace(documents[at], text=text)
                case 2:
                    new = msgspec.structs.replace(NEW, title=f"quokka {turn} {rng.random()}")
                    documents.insert(at, new)
                case 3:
                    rng.shuffle(documents)
        counting = Counting(encoder)
        make(path, counting, documents)
        texts = {f"{document.title}\n{document.text}" for document in documents}
        assert sorted(counting.passages_of) == sorted(texts - known)
        known = texts
        check(path, encoder, documents)


def test_a_new_fit_embeds_no_passage_again(path: Path, encoder: Encoder):
    counting = Counting(encoder)
    work = IndexWork()
    made = make(path, counting, [*DOCUMENTS, NEW], refit=True, work=work, evaluate=True)
    passages = {f"{document.title}\n{document.text}" for document in DOCUMENTS}
    assert made.fit.documents == 41 and not passages & {*counting.passages_of}
    check(path, encoder, [*DOCUMENTS, NEW])


def test_encoder_that_is_gone_leaves_the_index_as_it_is(path: Path, encoder: Encoder):
    before = opened(path).manifest
    lines: list[str] = []
    assert make(path, None, missing=identity(encoder), lines=lines, evaluate=True) == before
    assert lines == [f"index {path} is up to date"]
    # What moved has its vectors already.
    moved = [msgspec.structs.replace(d, origin=f"x/{d.origin}") for d in DOCUMENTS]
    after = make(path, None, moved, missing=identity(encoder), evaluate=True)
    assert after.encoder == before.encoder
    check(path, encoder, moved)


@pytest.mark.parametrize("refit", [False, True])
def test_new_text_for_an_encoder_that_is_gone_is_refused(path: Path, encoder: Encoder, refit: bool):
    before = (path / "index.json").read_bytes()
    with pytest.raises(Refusal) as refused:
        make(path, None, [*DOCUMENTS, NEW], missing=identity(encoder), refit=refit, evaluate=True)
    problem = refused.value.problem
    assert problem.code == "encoder-missing" and "--encoder own" in problem.remedy
    assert str(encoder.folder) in problem.where
    assert refit or problem.fact == "1 new passage"
    assert (path / "index.json").read_bytes() == before
    check(path, encoder, DOCUMENTS)


def test_index_made_without_the_encoder_drops_its_vectors(path: Path, encoder: Encoder):
    made = make(path, None, [*DOCUMENTS, NEW], evaluate=True)
    assert made.sets == {} and made.encoder is None
    assert made.evaluation is not None and made.evaluation.table_choice is None
    assert not [*path.rglob("queries.safetensors"), *path.rglob("covariance-*.npy")]
    index = opened(path)
    assert search(index, "quokka", 1).results[0].title == "quokka"
    index.close()


def test_another_encoder_embeds_every_passage_again(path: Path, encoder: Encoder, other: Encoder):
    assert other.id != encoder.id and other.dim == encoder.dim
    counting = Counting(other)
    made = make(path, counting, evaluate=True)
    passages = {f"{document.title}\n{document.text}" for document in DOCUMENTS}
    assert passages <= {*counting.passages_of}
    assert made.encoder == identity(other)
    check(path, other, DOCUMENTS)


class WithChoice:
    """An open index with other weights of voices."""

    def __init__(self, index: Index, mix: Mix, table: Mix | None) -> None:
        evaluation = index.manifest.evaluation
        assert evaluation is not None and evaluation.table_choice is not None
        choice = msgspec.structs.replace(evaluation.choice, mix=mix)
        by_table = None
        if table is not None:
            by_table = msgspec.structs.replace(evaluation.table_choice, mix=table)
        changed = msgspec.structs.replace(evaluation, choice=choice, table_choice=by_table)
        index.manifest = msgspec.structs.replace(index.manifest, evaluation=changed)


MIX = Mix(bm25=0.3, encoder=0.7)
TABLE_MIX = Mix(bm25=0.6, encoder=0.4)


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("query", ["how do i open a file", "socket port 7", "passage of 12"])
def test_scores_are_those_of_a_plain_loop_by_the_encoder_or_by_its_table(
    path: Path, encoder: Encoder, query: str, is_here: bool
):
    index = opened(path, encoder if is_here else None)
    WithChoice(index, MIX, TABLE_MIX)
    embedder = encoder if is_here else index.query_table
    assert embedder is not None
    mix = MIX if is_here else TABLE_MIX
    words = index.lexical.bm25_scores(index.words.of_query(query)).tolist()
    asked = embedder.queries([query])[0]
    chunks = list(index.passages)
    vectors = encoder.passages([chunk.indexed for chunk in chunks])
    cosines = [float(vector @ asked) for vector in vectors]
    best = [0.0] * len(DOCUMENTS)
    for chunk, cosine in zip(chunks, cosines, strict=True):
        best[chunk.document] = max(best[chunk.document], cosine)
    lowest = min(sorted(filter(None, best), reverse=True)[:DEPTH])
    expected = []
    for word_score, cosine in zip(words, best, strict=True):
        score = mix.bm25 * word_score / np.std(words)
        if cosine > 0:
            score += mix.encoder * (cosine - lowest) / np.std(cosines)
        expected.append(max(score, 1e-6) if word_score or cosine > 0 else 0.0)

    answer = search(index, query, 40)
    assert (answer.system, answer.by_table) == ("fused", not is_here)
    assert ("by a table" in answer.ranked_by) == (not is_here)
    assert answer.total == sum(score > 0 for score in expected)
    for result in answer.results:
        number = int(result.origin.partition(".")[0])
        assert result.score == pytest.approx(expected[number], abs=0.05)
        assert result.word_score == pytest.approx(words[number])
    ranked = [result.score for result in answer.results]
    assert ranked == sorted(ranked, reverse=True)
    index.close()


def test_search_by_the_encoder_alone_uses_its_table_where_it_is_gone(whole: Path, encoder: Encoder):
    index = opened(whole)
    answer = search(index, "how do i open a file", 5, "encoder")
    assert answer.by_table and answer.system == "encoder" and len(answer.results) == 5
    table = index.query_table
    assert table is not None
    asked = table.queries(["how do i open a file"])[0]
    vectors = encoder.passages([chunk.indexed for chunk in index.passages])
    best = sorted((vectors @ asked).tolist(), reverse=True)[:5]
    assert [result.score for result in answer.results] == pytest.approx(best, abs=2e-3)
    index.close()


def test_encoder_that_changed_in_its_place_is_not_asked(
    tmp_path: Path, path: Path, encoder: Encoder, other: Encoder
):
    """Its vectors are not of the index's space: the table answers."""
    index = opened(path, other)
    assert index.encoder is None
    assert search(index, "how do i open a file", 5, "encoder").by_table
    index.close()


def test_similar_passages_go_by_the_encoder(whole: Path, encoder: Encoder):
    index = opened(whole, encoder)
    chunks = list(index.passages)
    vectors = index.vectors(np.arange(len(chunks)), ENCODER_VECTORS)
    cosines = vectors @ vectors[4]
    expected = sorted(np.delete(cosines, 4).tolist(), reverse=True)[:3]
    found = similar(index, f"{chunks[4].id:016x}", 3)
    assert [result.score for result in found] == pytest.approx(expected, abs=1e-3)
    index.close()


@pytest.mark.parametrize("name", ["covariance-encoder.npy", "queries.safetensors"])
def test_damaged_files_of_vectors_are_refused_with_the_command(path: Path, name: str):
    file = next(path.rglob(name))
    content = file.read_bytes()
    rng = random.Random(name)
    for damage in range(8):
        match damage % 4:
            case 0:
                changed = content[: rng.randrange(len(content) // 2)]
            case 1:
                changed = b""
            case 2:
                changed = b"\xff" * len(content)
            case 3:
                changed = content[:6] + b"999999999" + content[15:]
        file.write_bytes(changed)
        assert refusal_of(path) == ("no-index", rebuilding(path)), damage


def test_covariance_that_is_not_there_is_refused_with_the_command(path: Path):
    next(path.rglob("covariance-encoder.npy")).unlink()
    assert refusal_of(path) == ("no-index", rebuilding(path))


def test_without_encoder_and_table_words_answer(path: Path):
    """A static encoder has no table."""
    next(path.rglob("queries.safetensors")).unlink()
    index = opened(path)
    WithChoice(index, MIX, None)
    answer = search(index, "how do i open a file", 5)
    assert (answer.system, answer.voices, answer.by_table) == ("bm25", ("bm25",), False)
    with pytest.raises(Refusal, match="the encoder is not on this machine"):
        search(index, "how do i open a file", 5, "encoder")
    index.close()


def test_table_that_was_measured_and_is_gone_is_refused(path: Path):
    next(path.rglob("queries.safetensors")).unlink()
    index = opened(path)
    WithChoice(index, MIX, TABLE_MIX)
    with pytest.raises(Refusal) as refused:
        search(index, "how do i open a file", 5)
    assert refused.value.problem.code == "no-index"
    index.close()


@pytest.mark.parametrize("shape", [(5, 5), (24,), (24, 24)])
def test_covariance_of_other_vectors_is_refused(path: Path, shape: tuple[int, ...]):
    values = np.full(shape, np.nan, np.float32) if shape == (24, 24) else np.ones(shape)
    np.save(next(path.rglob("covariance-encoder.npy")), values)
    assert refusal_of(path) == ("no-index", rebuilding(path))


def rebuilding(path: Path) -> str:
    """The command that mends a damaged index of a text."""
    return f"rm -r {path} && farspan index {path.parent}"


def refusal_of(path: Path) -> tuple[str, str]:
    """The code and the remedy of a search without the encoder."""
    (path.parent / "index.yaml").write_text("data: docs\n")
    with pytest.raises(Refusal) as refused:
        index = opened(path)
        try:
            search(index, "how do i open a file", 5, "encoder")
        finally:
            index.close()
    problem = refused.value.problem
    return problem.code, problem.remedy


def test_damaged_table_is_no_obstacle_where_the_encoder_is(path: Path, encoder: Encoder):
    next(path.rglob("queries.safetensors")).write_bytes(b"x")
    index = opened(path, encoder)
    assert search(index, "how do i open a file", 5, "encoder").results
    index.close()


def test_kept_vectors_are_the_old_ones_and_new_ones_in_order(whole: Path, encoder: Encoder):
    index = opened(whole, encoder)
    indexed = [chunk.indexed for chunk in index.passages]
    rng = np.random.default_rng(0)
    texts = [*indexed[10:20], "new one", *indexed[:3], "another new one", "new one"]
    kept = KeptVectors(index, ENCODER_VECTORS, texts)
    assert kept.new_texts == ["new one", "another new one", "new one"]
    assert kept.new.tolist() == [10, 14, 15] and kept.dim == encoder.dim
    new = rng.normal(size=(3, encoder.dim)).astype(np.float32)
    old = index.vectors(np.arange(len(indexed)), ENCODER_VECTORS)
    expected = np.concatenate([old[10:20], new[:1], old[:3], new[1:]])
    np.testing.assert_array_equal(kept.vectors(np.arange(16), new), expected)
    for rows in ([15], [3], [14, 2, 10], []):
        some = np.array(rows, np.int64)
        np.testing.assert_array_equal(kept.vectors(some, new), expected[rows])
    fresh = KeptVectors(None, ENCODER_VECTORS, ["a", "b"])
    assert fresh.new_texts == ["a", "b"]
    np.testing.assert_array_equal(fresh.vectors(np.array([1, 0]), new[:2]), new[[1, 0]])
    index.close()
