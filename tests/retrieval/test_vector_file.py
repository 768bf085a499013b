"""What is written for other databases is read back by the code that the page beside it gives."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from farspan.domain.problems import Refusal
from farspan.retrieval import targets
from farspan.retrieval.index import OWN_VECTORS, IndexFingerprint
from farspan.retrieval.vector_file import Row, rows, write_vectors
from tests.retrieval import making

ABOUT = IndexFingerprint(model="weights", tokenizer="words", fit="maps", dim=24)
#: More than a batch.
COUNT = 1500
DOCS = Path(__file__).parents[2] / "docs" / "stores-elsewhere.md"


def unit_vectors(count: int, dim: int) -> np.ndarray:
    drawn = np.random.default_rng(0).normal(size=(count, dim)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def made() -> list[Row]:
    """Ids up to the largest, and texts that JSON must escape."""
    return [
        Row(
            id=2**63 - 1 - number,
            vector=vector,
            text=f'the "{number}"\n\t字 🙂 \u2028',
            payload={
                "document": number // 3,
                "title": f"a, {number}",
                "origin": "docs/a b.txt",
                "page": 0,
            },
        )
        for number, vector in enumerate(unit_vectors(COUNT, ABOUT.dim))
    ]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("suffix", [".jsonl", ".npy", ".parquet"])
def test_exported_vectors_are_read_back_by_the_code_written_with_them(
    suffix, made, tmp_path, monkeypatch
):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    write_vectors(tmp_path / f"out{suffix}", iter(made), ABOUT)
    beside = {"out.jsonl"} if suffix == ".npy" else set()
    assert {file.name for file in tmp_path.iterdir()} == {
        f"out{suffix}",
        f"out{suffix}.load.md",
        *beside,
    }
    code = blocks(tmp_path / f"out{suffix}.load.md", "python")[0]
    monkeypatch.chdir(tmp_path)
    read: dict = {}
    exec(compile(code, "rows.py", "exec"), read)
    found = [row for some in read["batches"](700) for row in some]
    assert len(found) == COUNT
    for row, expected in zip(found, made, strict=True):
        assert np.array_equal(np.array(row.pop("vector"), np.float32), expected.vector)
        assert row == {**expected.payload, "id": str(expected.id), "text": expected.text}


def test_parquet_metadata_records_the_origin_of_the_vectors(made, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    write_vectors(tmp_path / "out.parquet", made, ABOUT)
    schema = parquet.read_schema(tmp_path / "out.parquet")
    assert msgspec.json.decode(schema.metadata[b"farspan"], type=IndexFingerprint) == ABOUT
    assert [str(schema.field(name).type) for name in ("id", "document", "title")] == [
        "string",
        "int64",
        "string",
    ]
    assert (
        str(schema.field("vector").type).startswith("list<")
        and schema.field("vector").type.value_type == "float"
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".npy", ".parquet"])
def test_an_index_without_passages_gives_an_empty_file(suffix, tmp_path):
    write_vectors(tmp_path / f"out{suffix}", [], ABOUT)
    if suffix == ".npy":
        assert np.load(tmp_path / "out.npy").shape == (0, ABOUT.dim)
    assert "24 numbers" in (tmp_path / f"out{suffix}.load.md").read_text()


def test_rows_are_those_of_the_indexs_files(tmp_path):
    folder = tmp_path / "index"
    marked = [
        msgspec.structs.replace(d, metadata={"year": str(n)}) if n % 2 else d
        for n, d in enumerate(making.DOCUMENTS)
    ]
    _, manifest = making.make(folder, evaluate=False, documents=marked)
    index = making.opened(folder)
    found = list(rows(index, OWN_VECTORS))
    for row, chunk in zip(found, index.passages, strict=True):
        document = marked[chunk.document]
        assert (row.id, row.text) == (chunk.id, chunk.text)
        assert row.payload == {
            "title": document.title,
            "origin": document.origin,
            "year": document.metadata.get("year", ""),
            "line": chunk.line,
            "page": chunk.page,
            "headings": "",
        }
    vectors = index.stores[OWN_VECTORS].vectors([row.id for row in found])
    assert np.array_equal(np.stack([row.vector for row in found]), vectors)
    index.close()
    write_vectors(tmp_path / "out.jsonl", found, manifest.about(OWN_VECTORS))


@pytest.mark.parametrize("name", ["out", "out.csv", "out.npz"])
def test_other_endings_are_refused(name, tmp_path):
    with pytest.raises(Refusal) as refused:
        write_vectors(tmp_path / name, [], ABOUT)
    problem = refused.value.problem
    assert problem.code == "out-of-range" and problem.remedy == "name it out.parquet"


@pytest.mark.parametrize("there", ["out.npy", "out.jsonl", "out.npy.load.md"])
def test_nothing_is_written_over(there, tmp_path):
    (tmp_path / there).write_text("mine")
    with pytest.raises(Refusal) as refused:
        write_vectors(tmp_path / "out.npy", [], ABOUT)
    assert refused.value.problem.code == "run-exists" and there in refused.value.problem.where
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(there, "mine")]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(Refusal) as refused:
        write_vectors(tmp_path / "absent" / "out.npy", [], ABOUT)
    assert refused.value.problem.code == "path-missing"


@pytest.mark.parametrize("suffix", [".jsonl", ".npy", ".parquet"])
def test_rows_that_cannot_be_read_leave_no_file(suffix, made, tmp_path):
    def failing():
        yield from made[:5]
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        write_vectors(tmp_path / f"out{suffix}", failing(), ABOUT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".jsonl", ".npy", ".parquet"])
def test_few_rows_are_held_at_a_time(suffix, tmp_path, monkeypatch):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    monkeypatch.setattr("farspan.retrieval.vector_file._BATCH", 100)
    vector = unit_vectors(1, 512)[0]
    about = msgspec.structs.replace(ABOUT, dim=512)
    # What libraries import when they are first used is no row.
    write_vectors(
        tmp_path / f"first{suffix}", [Row(id=0, vector=vector, text="", payload={})], about
    )
    passing = (Row(id=number, vector=vector.copy(), text="", payload={}) for number in range(2_000))
    tracemalloc.start()
    write_vectors(tmp_path / f"out{suffix}", passing, about)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The vectors alone are 4.1 MB.
    assert held < 1e6


FIELDS = {"document": int, "title": str}


def sections(dim: int, largest: int = 900) -> dict[str, str]:
    page = targets.page("vectors.jsonl", msgspec.structs.replace(ABOUT, dim=dim), FIELDS, largest)
    return {part.split("\n", 1)[0]: part for part in page.split("\n## ")}


@pytest.mark.parametrize("target", targets.TARGETS, ids=lambda target: target.name)
def test_page_of_each_database_has_the_size_the_fields_and_its_limit(target):
    fits, beyond = (sections(dim)[target.title] for dim in (target.numbers, target.numbers + 1))
    assert (
        "Too large" not in fits
        and f"Too large for it: these have {target.numbers + 1:,} numbers" in beyond
    )
    assert f"{target.numbers:,} numbers a vector" in fits and "OSINE" in fits.upper()
    schema = "".join(re.findall(r"```\w+\n(.*?)```", fits, re.DOTALL))
    assert str(target.numbers) in schema
    # Pinecone takes metadata as it comes.
    assert target.name == "pinecone" or all(f'"{name}"' in schema for name in FIELDS)
    for code in re.findall(r"```python\n(.*?)```", fits, re.DOTALL):
        ast.parse(code)


def test_page_warns_of_metadata_too_large_for_pinecone():
    assert (
        "Too large for it: these have 50,000 bytes of metadata" in sections(512, 50_000)["Pinecone"]
    )


def test_a_pinecone_request_stays_below_its_2_mb():
    for dim in (64, 512, 4096, 20_000):
        count = int(re.search(r"batches\((\d+)\)", sections(dim)["Pinecone"])[1])
        vector = unit_vectors(1, dim)[0].tolist()
        one = json.dumps({"id": str(2**63 - 1), "values": vector, "metadata": {"text": "x" * 900}})
        assert 1 <= count <= 1000 and (count == 1 or count * len(one) < 2e6)


def test_solrs_schema_is_json():
    body = re.search(r"-d '(.*?)'\n", sections(512)["Solr"], re.DOTALL)[1]
    assert json.loads(body)["add-field-type"]["vectorDimension"] == 512


def test_the_document_has_the_commands_as_they_are_written():
    about = IndexFingerprint(model="MODEL", tokenizer="TOKENIZER", fit="FIT", dim=512)
    fields = {"document": int, "title": str, "origin": str, "line": int, "page": int}
    page = targets.page("vectors.parquet", about, fields, 900)
    assert page.split("\n", 1)[1] in DOCS.read_text()


def test_no_torch_is_imported():
    code = (
        "import sys, farspan.retrieval.vector_file; print({'torch', 'pyarrow', 'jinja2'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
