"""Jupyter notebooks: the text and code of their cells, and what these printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farspan.corpus.formats._format import Format, Runs
from farspan.corpus.markdown import MarkdownOutline
from farspan.corpus.outline import read_outline
from farspan.corpus.reading import (
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    ReadOptions,
    UnreadableFile,
    first_words,
    open_utf8,
)
from farspan.domain.corpus import Document

#: Notebooks hold pictures; only their text is bounded as that of other documents is.
_MAX_FILE_BYTES = 256 << 20
#: Of a longer output the rest is left out: it is a log or a table.
_MAX_OUTPUT_CHARS = 10_000
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FENCES = re.compile(r"`{3,}")


def read_notebook(file: Path, options: ReadOptions) -> Iterator[Document]:
    """Read a notebook as Markdown, with code and outputs in fences."""
    with open_utf8(file, options.encoding) as stream:
        content = stream.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise UnreadableFile(TOO_LONG)
    try:
        notebook = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UnreadableFile("not a notebook", first_words(error)) from None
    cells = list(_cells_of(notebook))
    if not cells and not (isinstance(notebook, dict) and "nbformat" in notebook):
        raise UnreadableFile("not a notebook", "no list of cells")
    blocks = []
    size = 0
    for cell in cells:
        for block in _cell_blocks(cell, _language_of(notebook)):
            size += len(block)
            blocks.append(block)
        if size > MAX_DOCUMENT_BYTES:
            raise UnreadableFile(TOO_LONG)
    text = "\n\n".join(blocks).replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    outline = MarkdownOutline()
    headings = read_outline(text, outline)
    title = outline.title or options.stem(file)
    yield Document(title=title, text=text, origin=str(file), headings=headings)


def _cells_of(notebook: Any) -> Iterator[dict[str, Any]]:
    """Yield the cells of a notebook of format 4, or of 3, which has worksheets."""
    sheets = [notebook]
    worksheets = notebook.get("worksheets") if isinstance(notebook, dict) else None
    if isinstance(worksheets, list):
        sheets += worksheets
    for sheet in sheets:
        cells = sheet.get("cells") if isinstance(sheet, dict) else None
        for cell in cells if isinstance(cells, list) else ():
            if isinstance(cell, dict):
                yield cell


def _language_of(notebook: Any) -> str:
    """Return the language of a notebook's code, a word that can stand behind a fence."""
    value = notebook
    for key in ("metadata", "language_info", "name"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) and value.isalnum() else ""


def _cell_blocks(cell: dict[str, Any], language: str) -> Iterator[str]:
    """Yield a cell's text; its code and what that printed are fenced."""
    source = _joined(cell.get("source", cell.get("input")))
    if source.strip():
        is_code = cell.get("cell_type") == "code"
        yield _fence(source, language) if is_code else source.strip("\n")
    outputs = cell.get("outputs")
    for output in outputs if isinstance(outputs, list) else ():
        printed = _output_text(output) if isinstance(output, dict) else ""
        if printed.strip():
            yield _fence(_COLOURS.sub("", printed[:_MAX_OUTPUT_CHARS]), "")


def _output_text(output: dict[str, Any]) -> str:
    """Return the text of an output; a picture's caption for programs is none."""
    if output.get("output_type") == "stream":
        return _joined(output.get("text"))
    data = output.get("data")
    if not isinstance(data, dict):
        # Format 3 has the kinds of data beside each other.
        data = {"text/plain": output.get("text")} if "png" not in output else {}
    if any(kind.startswith("image/") for kind in data):
        return ""
    return _joined(data.get("text/plain"))


def _joined(lines: Any) -> str:
    """Return the text of a list of lines, or of a text."""
    if isinstance(lines, list):
        return "".join(line for line in lines if isinstance(line, str))
    return lines if isinstance(lines, str) else ""


def _fence(text: str, language: str) -> str:
    longest = max(map(len, _FENCES.findall(text)), default=2)
    fence = "`" * (longest + 1)
    lines = text.strip("\n")
    return f"{fence}{language}\n{lines}\n{fence}"


FORMATS = (Format((".ipynb",), read_notebook, runs=Runs.GUARDED, packed=True),)
