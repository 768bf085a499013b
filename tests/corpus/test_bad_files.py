"""Files and rows that cannot be read are left out and named; the rest of a source is read."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from farspan.corpus import prepare as corpus
from farspan.corpus.documents import PART_CHARS
from farspan.corpus.guarded import GuardedReader, Reader
from farspan.corpus.reading import MAX_DOCUMENT_BYTES, UnreadableFile, bounded_lines
from farspan.corpus.rows import MAX_FIELDS_BYTES, json_values
from farspan.corpus.sources import open_source
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.corpus import Document
from farspan.domain.problems import Problem, Refusal

#: Memory that reading any file may take beyond what the imports take: three times the longest row.
READING_BYTES = 6 * MAX_DOCUMENT_BYTES


def read(path: Path) -> tuple[list[str], list[str], list[str]]:
    """The texts of a source, what is left out, and what is read in another encoding."""
    source = open_source(str(path))
    texts = [document.text for document in source.documents()]
    skipped = [str(entry).replace(f"{path}/", "") for entry in source.skipped.entries()]
    recoded = [str(entry).replace(f"{path}/", "") for entry in source.recoded.entries()]
    return texts, skipped, recoded


def prepare(source: Path, folder: Path, **data: str) -> tuple[list[str], Problem | None]:
    """The reports of a preparation, and the refusal that it ended with."""
    said: list[str] = []
    try:
        corpus.prepare_corpus(
            DataConfig(source=str(source), val="50%", **data),
            TokenizerConfig(vocab=300),
            folder,
            workers=1,
            write_line=said.append,
        )
    except Refusal as refusal:
        return said, refusal.problem
    return said, None


def packed_rows(count: int) -> bytes:
    rows = "".join(json.dumps({"text": f"row {n} " * 9}) + "\n" for n in range(count))
    return rows.encode()


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_zst_file_that_is_cut_anywhere_is_left_out(
    frames: int, checksum: bool, tmp_path: Path
) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=checksum)
    whole = b"".join(compressor.compress(packed_rows(300)) for _ in range(frames))
    skippable = (0x184D2A53).to_bytes(4, "little") + (7).to_bytes(4, "little") + b"comment"
    file = tmp_path / "rows.jsonl.zst"
    for content in (whole, whole + skippable):
        file.write_bytes(content)
        assert len(read(tmp_path)[0]) == 300 * frames
    ends = {len(compressor.compress(packed_rows(300))) * number for number in range(frames + 1)}
    for length in {*range(1, len(whole), 37), *range(1, 20), len(whole) - 1} - ends:
        file.write_bytes(whole[:length])
        texts, skipped, _ = read(tmp_path)
        assert (texts, skipped) == ([], ["rows.jsonl.zst: cut off: ends before its end"]), length


def test_packed_files_without_content_and_with_other_bytes_behind(tmp_path: Path) -> None:
    empty = zstandard.compress(b"")
    (tmp_path / "a.jsonl.zst").write_bytes(empty)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(packed_rows(2)) + empty)
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(packed_rows(2)) + b"other" * 9)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b""))
    texts, skipped, _ = read(tmp_path)
    assert len(texts) == 2
    assert [entry.split(" (")[0] for entry in skipped] == [
        "a.jsonl.zst: no text in it",
        "c.jsonl.zst: damaged",
        "d.jsonl.gz: no text in it",
    ]


def test_a_gz_file_that_is_cut_is_left_out(tmp_path: Path) -> None:
    whole = gzip.compress(packed_rows(300))
    file = tmp_path / "rows.jsonl.gz"
    for length in (len(whole) - 1, len(whole) - 9, len(whole) // 2):
        file.write_bytes(whole[:length])
        assert read(tmp_path)[:2] == ([], ["rows.jsonl.gz: cut off: ends before its end"])


def test_a_source_that_is_one_damaged_file_is_refused(tmp_path: Path) -> None:
    packed = zstandard.compress(packed_rows(300))
    (tmp_path / "cut.jsonl.zst").write_bytes(packed[:-5])
    (tmp_path / "noise.txt").write_bytes(bytes(range(128, 256)) * 50)
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "columns.jsonl").write_text('{"abstract": "a", "id": 1}\n')
    for name, code, fact in [
        ("cut.jsonl.zst", "source-unreadable", "cut off"),
        ("noise.txt", "not-utf8", "in an unknown encoding"),
        ("list.jsonl", "source-unreadable", "2 .jsonl (rows): not a JSON object"),
        ("columns.jsonl", "source-unreadable", "its columns are abstract, id"),
    ]:
        _, problem = prepare(tmp_path / name, tmp_path / "cache")
        assert problem is not None
        assert (problem.code, fact in problem.fact) == (code, True), problem
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text(" \n")
    _, problem = prepare(tmp_path / "empty", tmp_path / "cache")
    assert problem is not None and problem.code == "no-documents"


def test_bad_files_and_rows_are_counted_and_named_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(30):
        (folder / f"good{number:02}.txt").write_text(f"the text number {number} of these")
    for number in range(5):
        (folder / f"pdf{number}.txt").write_bytes(b"%PDF-1.4 \xff\xfe\xfd")
    rows = ['{"text": "one"}', '{"text": ', "[3]", '{"text": null}', '{"text": "five"}']
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "nul.txt").write_bytes(b"PK\x03\x04\0\0\xff\xfe")
    said, problem = prepare(folder, tmp_path / "cache")
    assert problem is None
    texts, skipped, _ = read(folder)
    assert len(texts) == 32 and texts[-2:] == ["one", "five"]
    assert skipped == [
        "nul.txt: binary data, not text",
        *(f"pdf{number}.txt: a PDF by its content, not a text" for number in range(5)),
        "rows.jsonl:2: not a JSON object (Expecting value)",
        "rows.jsonl:3: not a JSON object (a list)",
        "rows.jsonl:4: no text in a column text, content or body (its columns are text)",
    ]
    # Who wants all or nothing is told of all at once, also of a corpus that is there already.
    for cache in ("cache", "other"):
        _, problem = prepare(folder, tmp_path / cache, bad="refuse")
        assert problem is not None and problem.code == "source-unreadable"
        assert "5 .txt: a PDF by its content" in problem.fact
        assert "2 .jsonl (rows): not a JSON object (rows.jsonl:2" in problem.fact
    assert said[0].startswith("reading ")


def test_whoever_reads_the_text_again_is_told_what_is_left_out(tmp_path: Path) -> None:
    """As the index does, of a text that is as it was and of one that has changed."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the text number {number} of these")
    (folder / "rows.jsonl").write_text('{"text": \n')
    data = DataConfig(source=str(folder), val="50%")
    words = TokenizerConfig(vocab=300)
    root = tmp_path / "cache"
    _, made = corpus.prepare_corpus(data, words, root, workers=1, write_line=lambda line: None)
    for count in (20, 21):
        said: list[str] = []
        text = corpus.read_text(data, words, made.hash, root, workers=1, write_line=said.append)
        assert len(text.documents) == count
        assert "skipped 1 .jsonl (rows): not a JSON object (rows.jsonl:1: Expecting value)" in said
        (folder / "new.txt").write_text("one more")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("the “quoted” price is 5€", "cp1252"),
        ("café noir", "cp1252"),
        ("naïve café, coöperate", "cp1252"),
        ("Größe und Maße über Straßen", "cp1252"),
        ("Les élèves étudient à l’école — “déjà vu”.", "cp1252"),
        ("Zażółć gęślą jaźń", "cp1250"),
        ("Привет, мир. Это текст.", "cp1251"),
        ("Рябина растёт у стены гавани. " * 5, "koi8_r"),
        ("港の壁のそばに木が生えている。" * 5, "cp932"),
        ("港口的墙边长着树。" * 5, "gb18030"),
        ("這是中文文本，需要識別。" * 5, "big5"),
        ("한국어 텍스트입니다. 안녕하세요", "cp949"),
        ("x" * (PART_CHARS + 7) + " é and more", "cp1252"),
    ],
)
def test_text_in_another_encoding_is_read_as_that_and_said(
    text: str, encoding: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    texts, skipped, recoded = read(tmp_path)
    assert "".join(texts) == text
    assert (skipped, recoded) == ([], [f"a.txt: read as {encoding}"])
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes(
        json.dumps({"text": text}, ensure_ascii=False).encode(encoding)
    )
    assert read(tmp_path) == ([text], [], [f"a.jsonl: read as {encoding}"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_with_a_byte_order_mark_is_read_by_it(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("café noir", encoding)
    (tmp_path / "b.jsonl").write_text('{"text": "un"}\n{"text": "déux"}\n', encoding)
    assert read(tmp_path) == (
        ["café noir", "un", "déux"],
        [],
        [f"a.txt: read as {encoding}", f"b.jsonl: read as {encoding}"],
    )


def test_a_page_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    page = '<html><head><meta charset="{}"></head><body><p>{}</p></body></html>'
    (tmp_path / "a.html").write_bytes(page.format("Shift_JIS", "港の壁").encode("cp932"))
    (tmp_path / "b.html").write_bytes(page.format("iso-8859-1", "“5€”").encode("cp1252"))
    (tmp_path / "c.html").write_bytes(page.format("no-such", "naïve café").encode("cp1252"))
    texts, _, recoded = read(tmp_path)
    assert texts == ["港の壁", "“5€”", "naïve café"]
    assert recoded == [
        f"{name}.html: read as {codec}"
        for name, codec in (("a", "cp932"), ("b", "cp1252"), ("c", "cp1252"))
    ]


def test_damaged_bytes_of_utf8_text_are_replaced_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode() * 400 + b"\xff" + "ü".encode() * 400)
    texts, _, recoded = read(tmp_path)
    assert texts == ["é" * 400 + "\ufffd" + "ü" * 400]
    assert recoded == ["a.txt: read as utf-8, damaged bytes replaced"]


def test_json_arrays_and_objects_over_several_lines_are_read_as_rows(tmp_path: Path) -> None:
    rows = [{"text": f'a "quoted" [{{{n}}}] \\ text', "tags": [[n], {"x": "]"}]} for n in range(40)]
    wanted = [str(row["text"]) for row in rows]
    for content in (
        json.dumps(rows),
        json.dumps(rows, indent=2),
        "\n\n".join(json.dumps(row, indent=4) for row in rows),
        "\ufeff " + json.dumps(rows, separators=(",", ":")),
        "\n".join(map(json.dumps, rows)),
    ):
        (tmp_path / "a.jsonl").write_text(content)
        assert read(tmp_path)[:2] == (wanted, []), content[:60]
    (tmp_path / "a.jsonl").write_text('[{"text": "one"}, 2, {"text": "three"}, {"text": ')
    texts, skipped, _ = read(tmp_path)
    assert (texts, len(skipped)) == (["one", "three"], 2)


def test_rows_without_text_are_left_out_and_packed_json_is_read_as_rows(tmp_path: Path) -> None:
    rows = b'{"text": "hello"}\n{"text": null}\n{"other": 1}\n{"text": "third"}\n'
    (tmp_path / "c4.json.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "c4.json.zst").write_bytes(zstandard.compress(rows))
    (tmp_path / "null.jsonl").write_bytes(rows)
    texts, skipped, _ = read(tmp_path)
    assert texts == ["hello", "third"] * 3
    assert skipped == [
        f"{name}:{row}: no text in a column text, content or body (its columns are {columns})"
        for name in ("c4.json.gz", "c4.json.zst", "null.jsonl")
        for row, columns in ((2, "text"), (3, "other"))
    ]


@pytest.mark.parametrize("read_bytes", [1, 2, 7, 1000])
def test_values_of_json_are_found_wherever_the_stream_is_cut(read_bytes: int) -> None:
    class Stream:
        def __init__(self, content: bytes) -> None:
            self.rest = content

        def read(self, size: int) -> bytes:
            piece = self.rest[:read_bytes]
            self.rest = self.rest[read_bytes:]
            return piece

    rows = [{"text": 'x\\"]},[' * n, "more": [[], {}, [[n]]]} for n in range(6)]
    most = len(json.dumps(rows[5])) - 1
    lines = "\n".join(map(json.dumps, rows))
    for content in (json.dumps(rows), lines, lines.replace("\n", "")):
        values = json_values(Stream(content.encode()), most)  # type: ignore[arg-type]
        assert [value and json.loads(value) for value in values] == [*rows[:5], None]


def test_a_line_that_is_too_long_is_passed_over_to_its_end() -> None:
    lines = [b"ab\n", b"x" * 100 + b"\n", b"cd\n", b"y" * 11, b"\n", b"z" * 500]
    assert list(bounded_lines(io.BytesIO(b"".join(lines)), 11)) == [
        b"ab\n",
        None,
        b"cd\n",
        None,
        None,
    ]


MEASURED = """
import sys
from farspan.corpus.sources import open_source
import farspan.corpus.rows, charset_normalizer

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

if __name__ == "__main__":
    source = open_source(sys.argv[1])
    before = peak()
    texts = [document.text[:20] for document in source.documents()]
    print([len(texts), len(source.skipped.entries()), peak() - before])
    print([str(entry).split(": ", 1)[1] for entry in source.skipped.entries()])
"""


def measured(folder: Path) -> tuple[int, list[str], int]:
    """Documents, what is left out, and the bytes that the process that reads them grows by."""
    command = [sys.executable, "-c", MEASURED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures, skipped = done.stdout.splitlines()
    documents, _, grown_bytes = json.loads(figures)
    return documents, json.loads(skipped.replace("'", '"')), grown_bytes


def write_zst(file: Path, begin: bytes, piece: bytes, size: int, end: bytes) -> None:
    """A packed file of `begin`, `size` bytes of pieces, and `end`."""
    with file.open("wb") as packed, zstandard.ZstdCompressor().stream_writer(packed) as stream:
        stream.write(begin)
        chunk = piece * (2**20 // len(piece))
        for _ in range(size // len(chunk)):
            stream.write(chunk)
        stream.write(end)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory through /proc")
@pytest.mark.parametrize(
    ("begin", "piece", "end", "reason"),
    [
        (b'{"text": "a"}\n{"text": "', b"x", b'"}\n{"text": "b"}', "longer than 16 MiB"),
        (b'[{"text": "a"}, {"text": "', b"x", b'"}, {"text": "b"}]', "longer than 16 MiB"),
        (b'{"text": "a"}\n{"text": ["', b"[],", b'0]}\n{"text": "b"}', "longer than 16 MiB"),
    ],
)
def test_a_line_of_128_mib_is_left_out_and_never_held(
    begin: bytes, piece: bytes, end: bytes, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl.zst"
    write_zst(file, begin, piece, 2**27, end)
    assert file.stat().st_size < 100_000
    documents, skipped, grown_bytes = measured(tmp_path)
    assert (documents, skipped) == (2, [reason])
    assert grown_bytes < READING_BYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory through /proc")
def test_a_gz_line_and_a_text_of_128_mib_are_never_held(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as packed:
        packed.write(b'{"text": "a"}\n{"text": "')
        for _ in range(128):
            packed.write(b"x" * 2**20)
        packed.write(b'"}\n{"text": "b"}')
    # A text is read whatever its length: this one has no lines, and no blocks on the disk.
    with (tmp_path / "b.txt").open("wb") as text:
        text.truncate(2**27)
    documents, skipped, grown_bytes = measured(tmp_path)
    assert documents == 2 + 2**27 // PART_CHARS
    assert skipped == ["longer than 16 MiB"]
    assert grown_bytes < READING_BYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory through /proc")
def test_a_row_of_many_small_values_is_left_out_and_never_decoded(tmp_path: Path) -> None:
    begin = b'{"text": "a"}\n{"text": "x", "n": ['
    end = b'0]}\n{"text": "b"}'
    write_zst(tmp_path / "a.jsonl.zst", begin, b"[],", MAX_DOCUMENT_BYTES - 2**20, end)
    documents, skipped, grown_bytes = measured(tmp_path)
    assert (documents, skipped) == (2, ["its fields beside the text are longer than 1 MiB"])
    assert grown_bytes < READING_BYTES


def test_rows_with_long_titles_and_fields_are_left_out(tmp_path: Path) -> None:
    long = "x" * (MAX_FIELDS_BYTES + 1)
    rows = [{"text": "a"}, {"text": "b", "title": long}, {"text": "c", "k": long}, {"text": long}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts, skipped, _ = read(tmp_path)
    assert texts == ["a", long]
    assert skipped == [
        f"a.jsonl:{row}: its fields beside the text are longer than 1 MiB" for row in (2, 3)
    ]


def test_a_page_that_is_too_long_is_left_out_and_a_text_is_read_in_parts(tmp_path: Path) -> None:
    text = "word " * (MAX_DOCUMENT_BYTES // 5 + 1)
    (tmp_path / "a.html").write_text(text)
    (tmp_path / "b.txt").write_text(text)
    texts, skipped, _ = read(tmp_path)
    assert "".join(texts) == text and max(map(len, texts)) <= PART_CHARS
    assert skipped == ["a.html: longer than 16 MiB"]


@pytest.mark.slow
def test_parquet_files_that_unpack_to_gigabytes_are_read_within_bounded_memory(
    tmp_path: Path,
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kib = 2**10
    tables = {
        # The same 10 MiB in each row, which the file holds once.
        "a": {"text": ["x" * (10 * kib * kib)] * 40 + ["end"]},
        "b": {"text": ["y" * (2**30), "end"]},
        "c": {"text": ["short"], "other": ["z" * (2**30)]},
        "d": {"text": [f"row {n}" for n in range(1000)]},
        "e": {"abstract": ["no text"]},
    }
    for name, columns in tables.items():
        parquet.write_table(
            pyarrow.table(columns), tmp_path / f"{name}.parquet", compression="zstd"
        )
        assert (tmp_path / f"{name}.parquet").stat().st_size < 100_000
    del columns, tables
    documents, skipped, grown_bytes = measured(tmp_path)
    assert documents == 41 + 1000
    assert skipped == [
        "takes too much memory",
        "takes too much memory",
        "no text in a column text, content or body (its columns are abstract)",
    ]
    assert grown_bytes < READING_BYTES


def endless(file: Path) -> Iterator[Document | None]:
    yield Document(title="first", text="before the end", origin="x")
    while True:
        pass


def greedy(file: Path) -> Iterator[Document | None]:
    yield Document(title="first", text="before the end", origin="x")
    bytearray(2**31)


def dying(file: Path) -> Iterator[Document | None]:
    yield Document(title="first", text="before the end", origin="x")
    os._exit(3)


def broken(file: Path) -> Iterator[Document | None]:
    yield None
    raise KeyError("no such object")


def honest(file: Path) -> Iterator[Document | None]:
    for number in range(3):
        yield None
        yield Document(title=f"\udce9{number}", text=f"text {number} \ud800", origin="x")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits that Linux enforces")
@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (endless, "takes more than 1 s of a core"),
        (greedy, "takes more than 256 MiB of memory"),
        (dying, "ends the process that reads it"),
        (broken, "damaged ('no such object')"),
    ],
)
def test_a_reader_that_takes_too_much_is_ended_and_the_next_file_is_read(
    reader: Reader, reason: str
) -> None:
    with closing(GuardedReader(memory_bytes=2**28, cpu_s=1)) as guarded:
        with pytest.raises(UnreadableFile) as caught:
            list(guarded.read(reader, Path("any")))
        assert str(caught.value) == reason
        documents = list(guarded.read(honest, Path("other")))
        assert [d.text for d in documents if isinstance(d, Document)] == [
            f"text {number} \ufffd" for number in range(3)
        ]


def test_each_folder_is_read_once_also_behind_links(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    target = tmp_path / "target"
    for folder, count in ((docs / "sub", 2), (target, 3)):
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number}.txt").write_text(f"{folder.name} {number}")
    (docs / "link").symlink_to("../target")
    (docs / "again").symlink_to("../target")
    (docs / "inside").symlink_to("sub")
    (docs / "sub" / "up").symlink_to("..")
    (target / "back").symlink_to("../docs")
    (docs / "broken.txt").symlink_to("../nowhere.txt")
    texts, skipped, _ = read(docs)
    assert sorted(texts) == ["sub 0", "sub 1", "target 0", "target 1", "target 2"]
    assert skipped == ["broken.txt: a link that leads to no file"]
    names = [document.origin for document in open_source(str(docs)).documents()]
    assert f"{docs}/sub/0.txt" in names, "in its own place"


def test_links_to_hidden_folders_are_followed_and_links_to_nothing_are_named(
    tmp_path: Path,
) -> None:
    docs = tmp_path / "docs"
    for place in (docs / ".store" / "deep", tmp_path / "target" / ".inner"):
        place.mkdir(parents=True)
        (place / "a.txt").write_text(f"in {place.name}")
    (docs / "data").symlink_to(".store")
    (docs / "inner").symlink_to("../target/.inner")
    (docs / "again").symlink_to(".store/deep")
    (docs / "itself.txt").symlink_to("itself.txt")
    (docs / "round").symlink_to("back")
    (docs / "back").symlink_to("round")
    (docs / "gone").symlink_to("../gone")
    (docs / "endless.txt").symlink_to("/dev/zero")
    os.mkfifo(docs / "pipe.txt")
    texts, skipped, _ = read(docs)
    assert sorted(texts) == ["in .inner", "in deep"]
    assert skipped == [
        *(f"{name}: a link that leads to no file" for name in ("back", "endless.txt", "gone")),
        "itself.txt: a link that leads to no file",
        "pipe.txt: no regular file",
        "round: a link that leads to no file",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_folders_and_files_that_may_not_be_opened_are_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.txt").write_text("open")
    (tmp_path / "b.txt").write_text("closed")
    (tmp_path / "b.txt").chmod(0)
    (tmp_path / "locked").chmod(0)
    try:
        texts, skipped, _ = read(tmp_path)
    finally:
        (tmp_path / "locked").chmod(0o700)
    assert texts == ["open"]
    assert skipped == [
        f"{name}: cannot be opened (Permission denied)" for name in ("b.txt", "locked")
    ]
