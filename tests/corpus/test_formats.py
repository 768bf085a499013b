"""Formats: what is read of each, what bounds it, and that no broken file stops or hangs a
folder."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farspan.corpus import pandoc
from farspan.corpus.formats import find_ending, list_formats, load_formats
from farspan.corpus.guarded import GuardedReader
from farspan.corpus.reading import ReadOptions, UnreadableFile
from farspan.corpus.rows import is_called_by_place
from farspan.corpus.sources import open_source
from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import Document
from farspan.domain.install import install_command
from farspan.domain.problems import Problem, Refusal
from tests.corpus.written_formats import (
    MESSAGE,
    XLSX_PARTS,
    with_converter,
    with_standard_library,
    zipped,
)
from tests.waiting import wait_for

needs_pandoc = pytest.mark.skipif(pandoc.find_pandoc() is None, reason="needs pandoc")


def read(
    path: Path, fields: FieldsConfig = FieldsConfig()
) -> tuple[dict[str, Document], list[str]]:
    """The documents of a source by where they are from, and what is left out."""
    source = open_source(str(path), fields)
    documents = {
        document.origin.replace(f"{path}/", ""): document for document in source.documents()
    }
    skipped = [str(entry).replace(f"{path}/", "") for entry in source.skipped.entries()]
    return documents, skipped


def refused(path: Path, fields: FieldsConfig) -> Problem:
    with pytest.raises(Refusal) as caught:
        read(path, fields)
    return caught.value.problem


def headings(document: Document) -> list[tuple[int, str]]:
    """The headings of a document, each of which stands where it says."""
    for heading in document.headings or ():
        assert heading.title in document.text[heading.start :].split("\n")[0]
    return [(heading.level, heading.title) for heading in document.headings or ()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Document], list[str]]:
    folder = tmp_path_factory.mktemp("plain")
    for ending, content in with_standard_library().items():
        (folder / f"a{ending}").write_bytes(content)
    return read(folder)


def test_formats_are_listed_without_being_imported() -> None:
    code = (
        "import sys; from farspan.corpus.formats import list_formats; print(list_formats());"
        "names = [m for m in sys.modules if m.startswith('farspan.corpus.formats.')];"
        "assert names == ['farspan.corpus.formats._format'], names"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(list_formats()), done.stderr
    assert len(load_formats()) > 100


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("a.TXT", ".txt"),
        ("a.b.jsonl.gz", ".jsonl.gz"),
        ("a.docx.gz", ".gz"),
        ("a.v1.2.md", ".md"),
        ("Makefile", ""),
        ("a.txt.bin", ".bin"),
    ],
)
def test_the_longest_known_ending_decides(name: str, ending: str) -> None:
    assert find_ending(Path(name)) == ending


def test_every_format_of_the_standard_library_is_read(
    plain: tuple[dict[str, Document], list[str]],
) -> None:
    documents, skipped = plain
    assert skipped == []
    read_endings = {find_ending(Path(origin.split(":")[0])) for origin in documents}
    assert read_endings == {*with_standard_library()} - {".zip"}
    in_zip = [origin for origin in documents if origin.startswith("a.zip/folder/a")]
    outside = [o for o in documents if not o.startswith("a.zip") and ".gz" not in o]
    assert len(in_zip) == len([o for o in outside if ".zst" not in o])


def test_titles_headings_and_lines_survive(plain: tuple[dict[str, Document], list[str]]) -> None:
    documents, _ = plain
    about = {name: (d.title, headings(d), d.line) for name, d in documents.items()}
    assert about["a.org"] == ("The title", [(1, "The heading")], 1)
    assert about["a.adoc"] == ("The title", [(1, "The title"), (2, "The heading")], 1)
    defined = [(1, "class Harbour"), (2, "def wall"), (1, "def rowan")]
    assert about["a.py"] == ("a.py", defined, 1)
    assert about["a.py.zst"] == about["a.py"]
    assert about["a.zip/folder/a.py"] == about["a.py"]
    assert about["a.c"] == ("a.c", [(1, "struct wall")], 1)
    assert about["a.jl"] == ("a.jl", [(1, "function wall")], 1)
    assert about["a.f90"] == ("a.f90", [(1, "subroutine wall")], 1)
    assert about["a.sql"] == ("a.sql", [], 1)
    assert about["a.txt.gz"] == ("a", [], 1)
    assert about["a.md.gz"] == ("The heading", [(1, "The heading")], 1)
    assert about["a.ipynb"] == ("A notebook", [(1, "A notebook")], 0)


def test_a_notebook_is_its_text_code_and_output(
    plain: tuple[dict[str, Document], list[str]],
) -> None:
    assert plain[0]["a.ipynb"].text == (
        "# A notebook\n\nIts text.\n\n```python\n# no heading\nprint(1)\n```\n\n```\none\n```"
    )


def test_subtitles_keep_the_lines_that_they_stand_on(
    plain: tuple[dict[str, Document], list[str]],
) -> None:
    lines = plain[0]["a.srt"].text.split("\n")
    assert {line: number for number, line in enumerate(lines, 1) if line} == {
        "The harbour wall": 3,
        "has a rowan.": 4,
        "A second line.": 8,
    }
    assert plain[0]["a.vtt"].text.split("\n")[3] == "The harbour wall."


def test_a_message_has_subject_people_date_and_named_attachments(
    plain: tuple[dict[str, Document], list[str]],
) -> None:
    for name in ("a.eml", "a.mbox:1"):
        message = plain[0][name]
        assert message.title == "Café in the harbour"
        assert message.text.strip() == "The café opens at ten.\nFrom now on."
        assert message.metadata == {
            "from": "Jürgen <j@example.org>",
            "to": "ann@example.org",
            "date": "2024-03-01T10:00:00+01:00",
            "attachments": "menu.pdf",
        }
    second = plain[0]["a.mbox:2"]
    assert (second.title, second.text.strip()) == ("Second", "A rowan.")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"Content-Type: text/plain; charset=iso-8859-1\n\n\x93caf\xe9\x94", "“café”"),
        (b"Content-Type: text/plain; charset=no-such\n\ncaf\xc3\xa9", "café"),
        (b"Content-Type: text/plain; charset=utf-8\n\ncaf\xe9", "café"),
        (b"Content-Type: text/html\n\n<p>A<br>b &lt;c&gt;", "A\nb <c>"),
        (b"Content-Transfer-Encoding: base64\n\nbm90aGluZw==\n", "nothing"),
    ],
)
def test_mail_in_wrong_charsets_and_html_is_read(body: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.eml").write_bytes(b"Subject: caf\xc3\xa9\n" + body)
    documents, _ = read(tmp_path)
    assert [(d.title, d.text.strip()) for d in documents.values()] == [("café", text)]


def test_a_row_of_a_table_is_a_document_cited_by_its_row(
    plain: tuple[dict[str, Document], list[str]],
) -> None:
    documents, _ = plain
    ann = documents["a.csv:2"]
    assert ann.text == 'Name: Ann, B\nAbstract: two\nlines "q"\nYear: 2001'
    assert (ann.title, ann.metadata["Year"]) == ("a.csv:2", "2001")
    assert documents["a.csv:3"].text == "Name: Carl\nAbstract: single\nYear: 2002"
    assert documents["a.tsv:3"].text == "A rowan."
    assert documents["a.tsv:3"].metadata == {"id": "2"}
    assert documents["a.csv.gz:3"].title == "a.csv.gz:3"
    assert documents["a.jsonl:2"].title == "a.jsonl:2"
    assert documents["a.json:1.2"].text == "A rowan."
    called = {
        name
        for name, document in documents.items()
        if is_called_by_place(document.title, document.origin)
    }
    in_zip = {name.removeprefix("a.zip/folder/") for name in called}
    assert {"a.csv:2", "a.jsonl:2", "a.json:1.2", "a.xlsx:3"} <= called & in_zip
    assert not called & {"a.jsonl:1", "a.py", "a.txt", "a.mbox:1", "a.eml"}


def test_a_row_of_a_sheet_is_a_document_with_its_dates(
    plain: tuple[dict[str, Document], list[str]],
) -> None:
    documents, _ = plain
    assert documents["a.xlsx:3"].text == "harbour: the wall\nbuilt: 2024-03-01T12:00:00"
    assert documents["a.xlsx:4"].text == "height: 8\nbuilt: 2024-03-02"


def test_sheets_are_cited_and_one_without_the_named_columns_is_left_out(tmp_path: Path) -> None:
    parts = dict(XLSX_PARTS)
    sheet = parts["xl/worksheets/sheet1.xml"]
    parts["xl/worksheets/sheet2.xml"] = sheet.replace("<t>harbour</t>", "<t>quay</t>")
    second = '<sheet name="Quays" sheetId="2" r:id="r2"/></sheets>'
    parts["xl/workbook.xml"] = parts["xl/workbook.xml"].replace("</sheets>", second)
    relation = re.search("<Relationship .*?/>", parts["xl/_rels/workbook.xml.rels"])
    assert relation is not None
    other = relation[0].replace("r1", "r2").replace("sheet1", "sheet2")
    parts["xl/_rels/workbook.xml.rels"] = parts["xl/_rels/workbook.xml.rels"].replace(
        relation[0], relation[0] + other
    )
    (tmp_path / "a.xlsx").write_bytes(zipped(dict(parts)))
    documents, skipped = read(tmp_path)
    assert {*documents} == {
        f"a.xlsx:{name}:{row}" for name in ("Harbours", "Quays") for row in (3, 4)
    }
    documents, skipped = read(tmp_path, FieldsConfig(text="quay"))
    assert {origin: d.text for origin, d in documents.items()} == {"a.xlsx:Quays:3": "the wall"}
    assert skipped == [
        "a.xlsx:4: no text in quay (its columns are height, built)",
        "a.xlsx:Harbours: no text in quay (its columns are harbour, height, built)",
    ]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("text;n\none;1\ntwo, three;2\n", ["one", "two, three"]),
        ("\ufefftext,n\none,1\n", ["one"]),
        ("1,one\n2,two\n", ["1\none", "2\ntwo"]),
        ("Text\none\n", ["one"]),
        ('text,n\n"open,1\ntwo,2\n', ["open,1\ntwo,2"]),
        ('a,b\n"x",\n,\n\n,y\n', ["a: x", "b: y"]),
    ],
)
def test_tables_are_read_as_programs_write_them(
    content: str, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(content)
    documents, skipped = read(tmp_path)
    assert ([document.text.strip() for document in documents.values()], skipped) == (texts, [])


def test_huge_cells_and_rows_are_left_out_and_the_rest_is_read(tmp_path: Path) -> None:
    huge = "x" * (17 << 20)
    rows = f"text,n\none,1\n{huge},2\n{'y' * (1 << 20)},3\n{'z,' * 3000}\nlast,4\n"
    (tmp_path / "a.csv").write_text(rows)
    documents, skipped = read(tmp_path)
    assert [len(document.text) for document in documents.values()] == [3, 1 << 20, 4]
    assert skipped == ["a.csv:3: longer than 16 MiB", "a.csv:5: more than 2,000 columns"]


ROWS = [
    {"id": "p1", "name": "One", "abstract": "A wall.", "body_": ["first", "second"]},
    {"id": "p2", "name": "Two", "abstract": "A rowan.", "body_": []},
]


def test_named_columns_make_text_title_and_place_of_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c.csv").write_text("id,NAME,abstract\np1,One,A wall.\np2,Two,A rowan.\n")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    fields = FieldsConfig(text=("abstract", "body_"), title="name", id="id")
    documents, skipped = read(tmp_path, fields)
    assert skipped == []
    rich = "A wall.\n\nfirst\nsecond"
    wanted = {}
    for name, text in (
        ("a.jsonl", rich),
        ("b.json", rich),
        ("c.csv", "A wall."),
        ("d.parquet", rich),
    ):
        wanted |= {f"{name}:p1": ("One", text), f"{name}:p2": ("Two", "A rowan.")}
    assert {origin: (d.title, d.text) for origin, d in documents.items()} == wanted
    assert documents["a.jsonl:p1"].metadata == {"id": "p1"}
    plain_fingerprint = open_source(str(tmp_path)).fingerprint()
    assert open_source(str(tmp_path), fields).fingerprint() != plain_fingerprint


def test_columns_within_objects_and_of_chats_can_be_named(tmp_path: Path) -> None:
    rows = [{"paper": {"abstract": "A wall."}, "messages": [{"role": "user", "content": "Hi"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for column, text in (("paper.abstract", "A wall."), ("messages", "user\nHi")):
        documents, _ = read(tmp_path, FieldsConfig(text=column))
        assert [document.text for document in documents.values()] == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_columns_that_no_row_has_are_refused_with_those_there_are(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if name.endswith("parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.table({"title": ["T"], "summary": ["A wall."]}), file
        )
    elif name.endswith("csv"):
        file.write_text("title,summary\nT,A wall.\n")
    else:
        file.write_text('{"title": "T", "summary": "A wall."}')
    (tmp_path / "other.txt").write_text("other text")
    problem = refused(tmp_path, FieldsConfig(text=("abstract", "sumary")))
    assert problem.code == "source-unreadable"
    assert problem.fact.endswith(
        "no text in a column abstract or sumary (its columns are title, summary)"
    )
    assert "data.fields.text" in problem.remedy
    # One file of several lacks the columns: it is left out.
    (tmp_path / "good.jsonl").write_text('{"abstract": "A rowan."}')
    documents, skipped = read(tmp_path, FieldsConfig(text="abstract"))
    assert {*documents} == {"good.jsonl:1", "other.txt"}
    assert len(skipped) == 1 and "no text in abstract (its columns are" in skipped[0]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Document], list[str]]:
    folder = tmp_path_factory.mktemp("office")
    for ending, content in with_converter().items():
        (folder / f"a{ending}").write_bytes(content)
    (folder / "b.zip").write_bytes(zipped({"in/x.docx": with_converter()[".docx"]}))
    return read(folder)


@needs_pandoc
def test_every_format_of_the_converter_is_read(
    office: tuple[dict[str, Document], list[str]],
) -> None:
    documents, skipped = office
    assert skipped == []
    assert {*documents} == {*(f"a{ending}" for ending in with_converter()), "b.zip/in/x.docx"}
    titled = [name for name, d in documents.items() if d.title == "The Great Title"]
    assert {*documents} - {*titled} == {"a.odt", "a.rtf"}, "these name it as a paragraph"
    for name, document in documents.items():
        assert "rowan growing" in " ".join(document.text.split()), name
        if name != "a.pptx":
            assert name == "a.fb2" or "Ann | 2001" in document.text, name
            assert {title for _, title in headings(document)} >= {
                "The first heading",
                "A deeper heading",
            }
    assert documents["a.docx"].metadata == {"author": "Ann B, Carl D", "date": "2024-03-01"}
    assert documents["a.docx"].text.startswith("# The Great Title\n")
    assert "a note [1]." in documents["a.docx"].text
    assert documents["b.zip/in/x.docx"].text == documents["a.docx"].text


@needs_pandoc
def test_slides_are_pages(office: tuple[dict[str, Document], list[str]]) -> None:
    document = office[0]["a.pptx"]
    assert document.page == 1
    slides = document.text.split("\f")
    assert len(slides) >= 3 and "rowan" in slides[1] + slides[2]


@needs_pandoc
def test_xml_is_read_by_its_first_tag(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text("<?xml version='1.0'?><!-- <article> --><feed><x/></feed>")
    (tmp_path / "b.xml").write_text(
        "<?xml version='1.0' encoding='iso-8859-1'?><article><front><article-meta><title-group>"
        "<article-title>Café</article-title></title-group></article-meta></front><body><p>é</p>"
        "</body></article>",
        encoding="iso-8859-1",
    )
    (tmp_path / "c.xml").write_text(
        '<book xmlns="http://docbook.org/ns/docbook"><title>T</title><chapter><title>C</title>'
        "<para>text</para></chapter></book>"
    )
    documents, skipped = read(tmp_path)
    assert [documents["b.xml"].title, documents["c.xml"].title] == ["Café", "T"]
    assert skipped == ["a.xml: XML that is neither JATS nor DocBook"]


def test_without_its_converter_a_file_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.docx").write_bytes(b"x")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.zip").write_bytes(zipped({"d.rtf": "x", "e.txt": "inner"}))
    with_it = open_source(str(tmp_path)).fingerprint()
    for module in ("farspan.corpus.formats.office", "farspan.corpus.pandoc"):
        monkeypatch.setattr(f"{module}.find_pandoc", lambda: None)
    documents, skipped = read(tmp_path)
    assert {*documents} == {"b.txt", "c.zip/e.txt"}
    command = install_command("formats")
    assert skipped == [f"a.docx: needs {command}", f"c.zip/d.rtf: needs {command}"]
    assert open_source(str(tmp_path)).fingerprint() != with_it
    with pytest.raises(Refusal) as caught:
        read(tmp_path / "a.docx")
    assert caught.value.problem.code == "extra-missing"
    assert caught.value.problem.remedy == command


@needs_pandoc
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.docx", b"no zip at all", "damaged (couldn't unpack docx container"),
        ("a.tex", rb"\def\a{\a\a}\a", "damaged (Loop encountered in expanding macro"),
        ("a.epub", zipped({"mimetype": "application/epub+zip"}), "damaged ("),
    ],
)
def test_what_the_converter_refuses_is_named_with_its_words(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    _, skipped = read(tmp_path)
    assert len(skipped) == 1 and skipped[0].startswith(f"{name}: {reason}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits that Linux enforces")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("while :; do :; done", "takes pandoc more than 1 s of a core"),
        ("sleep 1000 & exec cat /dev/zero", "longer than 16 MiB"),
        ("echo words of it >&2; exit 3", "damaged (words of it)"),
        ("exit 251", "takes pandoc more than 512 MiB of memory"),
    ],
)
def test_a_converter_that_takes_too_much_is_ended(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "pandoc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(pandoc, "CONVERTER_CPU_S", 1)
    monkeypatch.setattr(pandoc, "TAKES_TOO_LONG", "takes pandoc more than 1 s of a core")
    endless = pandoc.Pandoc(program, frozenset(["docx"]))
    with program.open("rb") as content, pytest.raises(UnreadableFile) as caught:
        pandoc.convert_to_html(endless, content, "docx", threading.Event())
    assert str(caught.value) == reason


def test_a_conversion_that_nobody_waits_for_ends_with_all_it_started(tmp_path: Path) -> None:
    program = tmp_path / "pandoc"
    children = tmp_path / "children"
    program.write_text(f"#!/bin/sh\nsleep 10000 & echo $! $$ > {children}\nwait\n")
    program.chmod(0o700)
    stopped = threading.Event()
    stopped.set()
    waiting = pandoc.Pandoc(program, frozenset(["docx"]))
    with program.open("rb") as content, pytest.raises(UnreadableFile):
        pandoc.convert_to_html(waiting, content, "docx", stopped)
    for pid in children.read_text().split() if children.exists() else ():
        # One that nobody has collected yet has no command line any more.
        line = Path("/proc", pid, "cmdline")
        wait_for(lambda line=line: not line.exists() or not line.read_bytes(), "its end")


@needs_pandoc
def test_pandoc_reads_no_other_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret word")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.tex").write_text(rf"Before. \input{{{secret}}} \include{{{secret}}} After.")
    documents, _ = read(docs)
    assert "secret word" not in "".join(document.text for document in documents.values())


def test_members_of_archives_are_cited_below_them_and_never_written_by_their_paths(
    tmp_path: Path,
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    inner = zipped({"deep.txt": "deep", "third.zip": zipped({"x.txt": "too deep"})})
    parts = {
        "a/b.txt": "one",
        "../../out.txt": "two",
        "/abs/c.md": "# Three",
        "dir\\d.txt": "four",
        "__MACOSX/._b.txt": "no",
        ".hidden/e.txt": "no",
        "f.bin": "no",
        "inner.zip": inner,
        "rows.csv": "text\nfive\n",
        f"{'long' * 100}.txt": "six",
    }
    (docs / "a.zip").write_bytes(zipped(parts))
    documents, skipped = read(docs)
    assert {origin: d.text.strip() for origin, d in documents.items()} == {
        "a.zip/a/b.txt": "one",
        "a.zip/out.txt": "two",
        "a.zip/abs/c.md": "# Three",
        "a.zip/dir/d.txt": "four",
        "a.zip/inner.zip/deep.txt": "deep",
        "a.zip/rows.csv:2": "five",
        f"a.zip/{'long' * 100}.txt": "six",
    }
    assert skipped == [
        "a.zip/f.bin: not a kind of file that can be read",
        "a.zip/inner.zip/third.zip: an archive in an archive in an archive",
    ]
    assert [path.name for path in tmp_path.rglob("*.txt")] == []


def test_archives_that_unpack_too_far_are_left_out(tmp_path: Path) -> None:
    zeros = bytes(30 << 20)
    (tmp_path / "a.zip").write_bytes(zipped({"zeros.txt": zeros, "good.txt": "good"}))
    (tmp_path / "b.zip").write_bytes(zipped({"inner.zip": zipped({"zeros.csv": zeros})}))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(zeros))
    (tmp_path / "d.mbox.gz").write_bytes(gzip.compress(zeros))
    documents, skipped = read(tmp_path)
    assert {*documents} == {"a.zip/good.txt"}
    reason = "unpacks to more than 200 times its size"
    assert skipped == [
        f"{name}: {reason}"
        for name in ("a.zip/zeros.txt", "b.zip/inner.zip/zeros.csv", "c.txt.gz", "d.mbox.gz")
    ]


def test_archives_of_too_many_or_locked_members_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.corpus.archives.MAX_MEMBERS", 3)
    (tmp_path / "a.zip").write_bytes(zipped({f"{n}.txt": "x" for n in range(4)}))
    locked = bytearray(zipped({"x.txt": "secret"}))
    central = locked.index(b"PK\x01\x02")
    locked[central + 8] |= 1
    locked[6] |= 1
    (tmp_path / "b.zip").write_bytes(locked)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x.txt", "x" * 100)
    (tmp_path / "c.zip").write_bytes(buffer.getvalue())
    assert read(tmp_path) == (
        {},
        [
            "a.zip: has more than 100,000 files in it",
            "b.zip/x.txt: needs a password",
            "c.zip/x.txt: packed in a way that is not read",
        ],
    )


def test_pages_without_text_are_counted(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    from tests.corpus.test_sources import pdf_with_text

    with_text = pypdf.PdfReader(io.BytesIO(pdf_with_text("Hello from a page")))
    for name, blank, filled in (("a", 14, 6), ("b", 3, 0), ("c", 0, 2)):
        writer = pypdf.PdfWriter()
        for _ in range(blank):
            writer.add_blank_page(100, 100)
        for _ in range(filled):
            writer.add_page(with_text.pages[0])
        writer.write(tmp_path / f"{name}.pdf")
    documents, skipped = read(tmp_path)
    assert {*documents} == {"a.pdf", "c.pdf"}
    assert skipped == [
        "a.pdf: no text (14 of 20 pages)",
        "b.pdf: no text in it, perhaps a scan (3 pages)",
    ]


def test_formats_of_before_keep_their_fingerprints(tmp_path: Path) -> None:
    """A corpus of text, pages and PDF is found as it was prepared by earlier versions."""
    files = {"a.txt": "text", "b.md": "# A", "c.html": "<p>x", "d.rst": "A\n=\n", "e.pdf": "%PDF-"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, (0, 0))
    import hashlib

    digest = hashlib.sha256(os.fsencode(tmp_path))
    read_as = {".txt": "", ".pdf": "whole words"}
    for name, content in sorted(files.items()):
        file = tmp_path / name
        about = f"\0{len(content)}\0{0}\0{read_as.get(file.suffix, 'outline')}\n"
        digest.update(os.fsencode(file) + about.encode())
    pytest.importorskip("pypdf")
    assert open_source(str(tmp_path)).fingerprint() == digest.hexdigest()


BROKEN = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=20)


def break_content(content: bytes, changes: list[tuple[int, int]], length: int) -> bytes:
    """A file that is cut, with some other bytes."""
    broken = bytearray(content[: max(1, length % (len(content) + 1))])
    for place, byte in changes:
        broken[place % len(broken)] = byte
    return bytes(broken)


@pytest.mark.property
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    endings=st.lists(st.sampled_from(sorted(with_standard_library())), min_size=3, max_size=3),
    changes=BROKEN,
    length=st.integers(0, 1 << 20),
)
def test_broken_files_never_stop_a_folder(
    endings: list[str],
    changes: list[tuple[int, int]],
    length: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    files = with_standard_library()
    for ending in endings:
        (folder / f"a{ending}").write_bytes(break_content(files[ending], changes, length))
    (folder / "whole.txt").write_text("this is whole")
    documents, skipped = read(folder)
    assert "whole.txt" in documents
    places = {*documents, *(entry.split(": ")[0] for entry in skipped)}
    reached = {place.split(":")[0].split("/")[0] for place in places}
    assert reached == {*(f"a{ending}" for ending in endings), "whole.txt"}
    assert len([*folder.iterdir()]) == len(reached)


@needs_pandoc
def test_broken_files_of_the_converter_never_stop_a_folder(tmp_path: Path) -> None:
    rng = random.Random(0)
    wanted = set()
    for ending, content in with_converter().items():
        for number in range(4):
            changes = [(rng.randrange(1 << 20), rng.randrange(256)) for _ in range(number * 5)]
            length = rng.randrange(len(content)) if number % 2 else len(content)
            name = f"{number}{ending}"
            (tmp_path / name).write_bytes(break_content(content, changes, length))
            wanted.add(name)
    (tmp_path / "whole.txt").write_text("this is whole")
    source = open_source(str(tmp_path))
    documents = {Path(document.origin).name for document in source.documents()}
    assert "whole.txt" in documents
    skipped = sum(sum(entry.counts.values()) for entry in source.skipped.entries())
    assert len(documents) + skipped == len(wanted) + 1
    unbroken = [name for name in wanted if name.startswith("0")]
    assert {*unbroken} <= documents


def test_a_guarded_reader_takes_options(tmp_path: Path) -> None:
    (tmp_path / "a.eml").write_bytes(MESSAGE)
    guarded = GuardedReader()
    known = load_formats()[".eml"]
    try:
        items = list(guarded.read(known.read, tmp_path / "a.eml", ReadOptions(ending=".eml")))
    finally:
        guarded.close()
    assert [item.title for item in items if isinstance(item, Document)] == ["Café in the harbour"]


MANY_FILES = """
import sys
from farspan.corpus.sources import open_source

if __name__ == "__main__":
    source = open_source(sys.argv[1])
    count = sum(1 for document in source.documents())
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(count, peak << 10)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory through /proc")
def test_many_small_files_and_a_large_one_are_read_within_bounded_memory(tmp_path: Path) -> None:
    """A twentieth of 50,000 files and 300 MB, which may take 1.5 GB: what is held of them is
    bounded by the longest part of a text, not by their number or size."""
    for number in range(2500):
        folder = tmp_path / str(number % 25)
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text(f"the text number {number}\n" * 20)
    with (tmp_path / "large.txt").open("w") as large:
        for number in range(15):
            large.write(f"{number} words of a long text. " * 40_000 + "\n")
    command = [sys.executable, "-c", MANY_FILES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents, peak_bytes = map(int, done.stdout.split())
    assert documents > 2550
    assert peak_bytes < 150 << 20
