"""Sources: each kind of file as its own library writes it, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import pydoc
import random
import subprocess
import sys
import warnings
from pathlib import Path

import msgspec
import pytest
import zstandard

from farspan.corpus.documents import PART_CHARS, clean_text, cut_document
from farspan.corpus.sources import list_sources, open_source
from farspan.domain.corpus import Document, SkipLog, Skipped, by_kind
from farspan.domain.install import install_command
from farspan.domain.problems import Problem, Refusal


def read(spec: object) -> list[Document]:
    return list(open_source(str(spec)).documents())


def refused(spec: object) -> Problem:
    with pytest.raises(Refusal) as caught:
        read(spec)
    assert caught.value.problem.remedy
    return caught.value.problem


def test_plugins_are_listed_by_file_name_without_being_imported() -> None:
    code = (
        "import sys; from farspan.corpus.sources import list_sources; print(list_sources());"
        "assert not [m for m in sys.modules if m.startswith('farspan.corpus.sources.')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list_sources()) == "['folder', 'huggingface', 'pydocs']"


@pytest.fixture(scope="module")
def pydocs() -> list[Document]:
    return read("pydocs")


@pytest.mark.slow
def test_pydocs_is_the_documentation_of_python_and_torch_by_its_real_names(
    pydocs: list[Document],
) -> None:
    by_title = {document.title: document.text for document in pydocs}
    assert len(by_title) == len(pydocs)
    assert 7e6 < sum(len(text.encode()) for text in by_title.values()) < 8.5e6
    import torch  # only now: reading must not need it

    assert by_title["json.JSONDecoder.decode"].startswith("Return the Python representation")
    assert by_title["math.sin"] == pydoc.getdoc(__import__("math").sin)
    for name, thing in {
        "torch.nn.Linear": torch.nn.Linear,
        "torch.optim.AdamW": torch.optim.AdamW,
    }.items():
        assert by_title[name][:60] == pydoc.getdoc(thing)[:60]
    assert "Computes the absolute value" in by_title["torch.abs"]
    assert (
        "torch.Tensor.abs" in by_title
        and "torch.nn.functional.conv1d" in by_title
        and "with" in by_title
    )
    public = [
        title for title in sorted(by_title) if title.startswith(("torch.", "json.", "asyncio."))
    ]
    sample = random.Random(0).sample([title for title in public if "._" not in title], 500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unknown = [title for title in sample if pydoc.locate(title) is None]
    assert len(unknown) < 0.05 * len(
        sample
    )  # modules of other systems, and what `__all__` keeps from a star


def test_reading_pydocs_imports_no_torch_and_runs_no_jokes() -> None:
    code = (
        "import sys\nfrom farspan.corpus.sources import open_source\n"
        "if __name__ == '__main__':\n"
        "    source = open_source('pydocs'); source.fingerprint(); next(source.documents())\n"
        "    from farspan.corpus.sources.pydocs import _import_docstrings\n"
        "    assert len(_import_docstrings()) > 1000\n"
        "    assert not {'torch', 'this', 'antigravity', 'turtle', 'idlelib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_kind_of_text_file_is_read(tmp_path: Path) -> None:
    rows = [{"text": f"row {i} é", "title": f"T{i}", "n": i, "tags": ["x"]} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "a.TXT").write_bytes("\ufefffirst\r\nline\n".encode())
    (tmp_path / "b.md").write_text("intro\n\n# The heading #\n\nbody")
    (tmp_path / "c.rst").write_text("Title of it\n===========\n\nbody")
    (tmp_path / "d.html").write_text(
        "<html><head><title>Page &amp; "
        "one</title><style>p{}</style></head><body><h1>Head</h1><p>One <b>bold</b>\n"
        "word.<p>Two<br>lines &lt;x&gt;<script>no()</script><pre>  keep\n    this</pre></body>"
    )
    (tmp_path / "sub" / "e.jsonl").write_bytes(lines + b"\n")
    (tmp_path / "sub" / "f.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "sub" / "g.jsonl.zst").write_bytes(
        zstandard.compress(lines[:40]) + zstandard.compress(lines[40:])
    )
    (tmp_path / "sub" / "h.bin").write_bytes(b"\0\1")
    source = open_source(str(tmp_path))
    documents = [part for document in source.documents() for part in cut_document(document)]
    assert [d.title for d in documents] == [
        "a",
        "The heading",
        "Title of it",
        "Page & one",
        *["T0", "T1", "T2"] * 3,
    ]
    assert documents[0].text == "first\nline"
    assert documents[3].text == "# Head\n\nOne bold word.\n\nTwo\nlines <x>\n\n  keep\n    this"
    assert [d.text for d in documents[4:7]] == ["row 0 é", "row 1 é", "row 2 é"]
    assert documents[5].metadata == {"n": "1"}
    assert documents[5].origin == f"{tmp_path}/sub/e.jsonl:2"
    assert list(map(str, source.skipped.entries())) == [
        f"{tmp_path}/sub/h.bin: not a kind of file that can be read"
    ]
    assert [d.text for d in read(tmp_path / "b.md")] == ["intro\n\n# The heading #\n\nbody"]


def test_a_document_knows_the_line_and_page_of_its_source_on_which_it_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.md").write_text("\n\n# Third line\n\nbody")
    (tmp_path / "b.txt").write_text("\f\nsecond page, second line\n\fthird page")
    paragraph = "word " * 1000 + "\n\n"
    (tmp_path / "long.txt").write_text("".join(f"{n} {paragraph}" for n in range(120)))
    documents = [
        part
        for document in open_source(str(tmp_path)).documents()
        for part in cut_document(document)
    ]
    assert [(d.line, d.page) for d in documents[:2]] == [(3, 0), (2, 2)]
    lines = (tmp_path / "long.txt").read_text().split("\n")
    assert len(documents) > 4
    for part in documents[2:]:
        assert (
            lines[part.line - 1].startswith(part.text.split("\n")[0][:20].strip())
            and part.page == 0
        )


def test_parquet_and_pdf(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pypdf = pytest.importorskip("pypdf")
    table = pyarrow.table({"content": [f"row {i}" for i in range(1000)], "year": list(range(1000))})
    parquet.write_table(table, tmp_path / "a.parquet")
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "b.pdf")
    (tmp_path / "c.pdf").write_bytes(b"no pdf at all")
    (tmp_path / "d.pdf").write_bytes(pdf_with_text("Hello from a page"))
    source = open_source(str(tmp_path))
    documents = list(source.documents())
    assert [d.text for d in documents if d.text and "row" in d.text] == [
        f"row {i}" for i in range(1000)
    ]
    assert documents[7].metadata == {"year": "7"}
    assert documents[-1].text.strip() == "Hello from a page"
    assert str(source.skipped.entries()[0]) == f"{tmp_path}/b.pdf: no text in it, perhaps a scan"
    assert str(source.skipped.entries()[1]).startswith(f"{tmp_path}/c.pdf: damaged (")


def test_an_extra_that_is_installed_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.txt").write_text("plain")
    plain = open_source(str(tmp_path / "a.txt")).fingerprint()
    (tmp_path / "b.pdf").write_bytes(pdf_with_text("Hello from a page"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pypdf", None)
        source = open_source(str(tmp_path))
        assert [d.text for d in source.documents()] == ["plain"]
        assert list(map(str, source.skipped.entries())) == [
            f"{tmp_path}/b.pdf: needs {install_command('pdf')}"
        ]
        assert open_source(str(tmp_path / "a.txt")).fingerprint() == plain, "it needs no extra"
    assert open_source(str(tmp_path)).fingerprint() != source.fingerprint()
    assert len(read(tmp_path)) == 2


def test_names_that_are_not_utf8_and_halves_of_characters_can_be_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    try:
        (tmp_path / f"{name}.txt").write_text("coffee")
    except OSError:
        pytest.skip("waits for a file system that takes any bytes as a name")
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "tea", "k\\ud800": "v\\udfff", "\\ud83d\\ude00": "\\ud83d\\ude00"}\n'
    )
    assert len(open_source(str(tmp_path)).fingerprint()) == 64
    found = [part for document in read(tmp_path) for part in cut_document(document)]
    coffee, tea = msgspec.json.decode(msgspec.json.encode(found), type=list[Document])
    assert (coffee.title, coffee.text, coffee.origin) == (
        "caf\ufffd",
        "coffee",
        f"{tmp_path}/caf\ufffd.txt",
    )
    assert tea.metadata == {"k\ufffd": "v\ufffd", "😀": "😀"}


def pdf_with_text(text: str) -> bytes:
    content = f"BT /F1 12 Tf 20 50 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",  # noqa: E501
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    file = b"%PDF-1.4\n"
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % len(file)
    return file + b"xref\n0 6\n0000000000 65535 f \n" + table + trailer


def test_local_datasets_are_streamed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"row {i}", "title": f"T{i}", "id": i} for i in range(30)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("saved", "files"):
        documents = read(f"hf:{tmp_path}/{name}")
        found = [(d.title, d.text, d.metadata) for d in documents]
        assert found == [(row["title"], row["text"], {"id": str(row["id"])}) for row in rows]
    assert refused(f"hf:{tmp_path}/savd").code == "path-missing"


def test_a_path_without_files_that_can_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    problem = refused(tmp_path / "paper")
    assert (problem.code, f"{tmp_path}/papers" in problem.remedy) == ("path-missing", True)
    (tmp_path / "papers" / "x.bin").write_bytes(b"x")
    (tmp_path / "papers" / "y.bin").write_bytes(b"x")
    problem = refused(tmp_path / "papers")
    assert (problem.code, "2 .bin" in problem.fact) == ("no-documents", True)
    problem = refused("~nobody-here/papers")
    assert (problem.code, problem.where) == ("path-missing", "~nobody-here/papers")


def test_skipped_files_are_counted_by_kind_and_reason_with_the_first_names() -> None:
    names = [*(f"d/{n}.bin" for n in range(2500)), "and 3 more/x.EXE", "d/Makefile"]
    log = SkipLog()
    for name in names:
        log.add(Skipped.file(name, "odd"))
    log.add(Skipped.file("d/a.pdf", "damaged", "b: c", bad=True))
    for number in range(1, 40):
        log.add(Skipped.row(Path("d/r.jsonl"), number, "odd row", f"column {number}"))
    assert list(map(str, by_kind(log.entries()))) == [
        "2500 .bin, 1 .exe, 1 without an extension: odd (0.bin, 1.bin, 2.bin)",
        "1 .pdf: damaged (a.pdf: b: c)",
        "39 .jsonl (rows): odd row (r.jsonl:1: column 1, r.jsonl:2: column 2, r.jsonl:3: column 3)",
    ]
    assert len(log.entries()) == 20 + 1 + 20 + 2, "named for each reason, the others counted"
    assert [entry.bad for entry in by_kind(log.entries())] == [False, True, True]


def test_long_texts_are_cut_in_parts_that_lose_nothing_but_blank_lines() -> None:
    rng = random.Random(0)
    text = "".join(rng.choice(["word ", "other ", "line\n", "par\n\n"]) for _ in range(150_000))
    found = list(cut_document(Document(title="Book", text=text, origin="x")))
    assert [d.title for d in found] == ["Book", "Book (part 2)", "Book (part 3)", "Book (part 4)"]
    assert all(0 < len(d.text) <= PART_CHARS for d in found)
    assert "\n".join(d.text for d in found).split() == clean_text(text).split()
    assert len(list(cut_document(Document(title="x", text="é" * (2 * PART_CHARS), origin="")))) == 2


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000\n\n\u3000", "\u2028", "\n\x85\n"])
def test_text_of_blank_space_alone_is_no_document(blank: str) -> None:
    assert not list(cut_document(Document(title="Blank", text=blank, origin="x")))


def test_cleaning_leaves_text_that_can_be_written() -> None:
    assert (
        clean_text("\ufeff a\r\nb\rc\0 \ud800 \U0001f600 \ud83d\ude00 ") == "a\nb\nc \ufffd 😀 😀"
    )


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("---\ntitle: Foo\ndate: 2024\n---\n\n# Real", "Foo"),
        ('---\ndate: 2024\ntitle: "Foo: a bar" \n---\n\n# Real', "Foo: a bar"),
        ("---\r\n# made by hand\r\ndate: 2024\r\n---\r\n\r\n# Real", "Real"),
        ("---\ntitle: >\n  folded\n---\n\nReal\n====", "Real"),
        ("---\ntitle: ''\n---\n\nno heading", "a"),
        ("---\n\nNo front matter\n---\n", "No front matter"),
    ],
)
def test_front_matter_is_no_heading_but_may_name_the_title(
    text: str, title: str, tmp_path: Path
) -> None:
    (tmp_path / "a.md").write_bytes(text.encode())
    assert [(d.title, d.text) for d in read(tmp_path)] == [(title, text)]


def test_headings_are_found_with_windows_line_ends_and_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "a.rst").write_bytes(b"Crossed\r\n=======\r\n\r\nbody")
    (tmp_path / "b.md").write_bytes("\ufeff# Marked\n\nbody".encode())
    (tmp_path / "c.md").write_bytes(b"# Windows\r\n\r\nbody")
    assert [d.title for d in read(tmp_path)] == ["Crossed", "Marked", "Windows"]


def test_the_title_of_a_drawing_is_not_that_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<title>Page</title><p>One<svg><title>Icon</title><text>no</text></svg> "
        "two<svg><title>Logo</title></svg>"
    )
    (document,) = read(tmp_path)
    assert document.title == "Page"
    assert document.text.split() == ["One", "two"]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"text": "a"}\n{"text": "b"}\n'.encode())
    (tmp_path / "b.jsonl").write_bytes('\ufeff\n{"text": "c"}\n'.encode())
    assert [d.text for d in read(tmp_path)] == ["a", "b", "c"]


def test_a_path_named_like_a_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("folder").code == "path-missing"
    (tmp_path / "aside.txt").write_text("not asked for")
    for name in ("folder", "hf", "huggingface"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text in {name}")
        assert [d.text for d in read(name)] == [f"text in {name}"]
        assert [d.text for d in read(f"folder:{name}")] == [f"text in {name}"]


def test_a_report_names_some_kinds_and_what_several_have_in_common_once() -> None:
    log = SkipLog()
    for kind in "abcdefgh":
        log.add(Skipped.file(f"d/x.{kind}", "odd"))
        log.add(Skipped.file(f"d/{kind}.docx", "damaged", "x" * 200 if kind == "c" else "no zip"))
    assert list(map(str, by_kind(log.entries()))) == [
        "1 .a, 1 .b, 1 .c, 1 .d, 1 .e, 1 .f, 2 of 2 other kinds: odd (x.a, x.b, x.c)",
        f"8 .docx: damaged (a.docx, b.docx: no zip, c.docx: {'x' * 120}...)",
    ]
