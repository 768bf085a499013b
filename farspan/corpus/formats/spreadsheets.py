"""Excel workbooks (.xlsx): each row of each sheet is a document."""

from __future__ import annotations

import datetime
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple
from xml.etree import ElementTree

from farspan.corpus.formats._format import Format, Runs
from farspan.corpus.formats._table import MAX_COLUMNS, Table
from farspan.corpus.reading import ReadOptions, UnreadableFile
from farspan.domain.corpus import Document, Skipped

#: Numbers of formats that are dates and times, and what says so in a format of the file's own
#: (ECMA-376 part 1, 18.8.30).
_DATE_FORMATS = frozenset((*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)))
_DATE_CODE = re.compile(r"(?:[ymdhs](?![a-z]*\])){1,5}", re.IGNORECASE)
_LITERALS = re.compile(r"\"[^\"]*\"|\\.|\[[^\]]*\]")
#: The day before day 1 of March 1900, as a workbook counts.
_EPOCH = datetime.datetime(1899, 12, 30)
_COLUMN = re.compile(r"([A-Z]{1,3})\d*")


class _Workbook(NamedTuple):
    """What the cells of all sheets refer to."""

    strings: list[str]
    #: Whether a cell of each style is a date.
    dates: list[bool]


def read_workbook(file: Path, options: ReadOptions) -> Iterator[Document | Skipped | None]:
    """Read the sheets of a workbook in their order."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise UnreadableFile("damaged", str(error)) from None
    with archive:
        workbook = _Workbook(_read_strings(archive), _read_dates(archive))
        sheets = _find_sheets(archive)
        lacking: list[tuple[str, UnreadableFile]] = []
        for name, part in sheets.items():
            table = Table(file, options.fields, name if len(sheets) > 1 else "")
            try:
                for number, cells in _read_cells(archive, part, workbook):
                    yield None
                    yield from table.read_row(cells, number)
            except UnreadableFile as error:
                # Another sheet may have the columns that are named.
                lacking.append((name, error))
        if len(lacking) == len(sheets):
            raise lacking[0][1]
        for name, reason in lacking:
            yield Skipped.file(f"{file}:{name}", reason.reason, reason.detail, bad=True)


def _find_sheets(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the sheets of a workbook: the part of the archive that holds each, by its name."""
    targets = {}
    for tag, element in _elements(archive, "xl/_rels/workbook.xml.rels"):
        if tag == "Relationship":
            target = element.get("Target", "")
            path = target.lstrip("/") if target.startswith("/") else f"xl/{target}"
            targets[element.get("Id")] = path
    sheets = {}
    for tag, element in _elements(archive, "xl/workbook.xml"):
        if tag == "sheet":
            reference = next((v for k, v in element.items() if k.endswith("}id")), None)
            part = targets.get(reference)
            if part in archive.NameToInfo:
                sheets[" ".join(element.get("name", "").split())[:100]] = part
    if not sheets:
        raise UnreadableFile("damaged", "a workbook without sheets")
    return sheets


def _read_strings(archive: zipfile.ZipFile) -> list[str]:
    """Return the strings that cells refer to by number."""
    strings = []
    for tag, element in _elements(archive, "xl/sharedStrings.xml"):
        if tag == "si":
            strings.append(_text_of(element))
            element.clear()
    return strings


def _read_dates(archive: zipfile.ZipFile) -> list[bool]:
    """Return for each style of cells whether it shows numbers as dates."""
    codes: dict[str, bool] = {}
    dates: list[bool] = []
    for tag, element in _elements(archive, "xl/styles.xml"):
        if tag == "numFmt":
            code = _LITERALS.sub("", element.get("formatCode", ""))
            codes[element.get("numFmtId", "")] = _DATE_CODE.search(code) is not None
        elif tag == "cellXfs":
            for style in element:
                number = style.get("numFmtId", "0")
                is_known = number.isdecimal() and int(number) in _DATE_FORMATS
                dates.append(codes.get(number, is_known))
    return dates


def _read_cells(
    archive: zipfile.ZipFile, part: str, workbook: _Workbook
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row of a sheet, and its cells."""
    number = 0
    for tag, row in _elements(archive, part):
        if tag != "row":
            continue
        given = row.get("r", "")
        number = int(given) if given.isdecimal() and len(given) < 9 else number + 1
        cells: list[str] = []
        for cell in row:
            column = _COLUMN.match(cell.get("r", ""))
            place = _column_number(column[1]) if column else len(cells)
            if len(cells) <= place <= MAX_COLUMNS:
                cells += [""] * (place - len(cells))
                cells.append(_cell_text(cell, workbook))
        # Rows before are not held.
        row.clear()
        yield number, cells


def _column_number(letters: str) -> int:
    """Return the number of a column from 0 on: A is 0, AA is 26."""
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - ord("A") + 1
    return number - 1


def _cell_text(cell: ElementTree.Element, workbook: _Workbook) -> str:
    kind = cell.get("t", "n")
    value = next((part.text or "" for part in cell if _local_name(part) == "v"), "")
    if kind == "inlineStr":
        return _text_of(cell)
    if kind == "s":
        is_number = value.isdecimal() and len(value) < 10
        number = int(value) if is_number else len(workbook.strings)
        return workbook.strings[number] if number < len(workbook.strings) else ""
    if kind == "b":
        return {"1": "true", "0": "false"}.get(value, value)
    style = cell.get("s", "")
    number = int(style) if style.isdecimal() and len(style) < 7 else len(workbook.dates)
    if kind == "n" and number < len(workbook.dates) and workbook.dates[number]:
        return _date_text(value)
    return value


def _date_text(value: str) -> str:
    """Return a date as ISO 8601 has it, without the time at midnight; what is no date as it is."""
    try:
        date = _EPOCH + datetime.timedelta(days=float(value))
    except (ValueError, OverflowError):
        return value
    date = (date + datetime.timedelta(milliseconds=500)).replace(microsecond=0)
    if date.year < 1900:
        return date.time().isoformat()
    return date.isoformat().removesuffix("T00:00:00")


def _text_of(element: ElementTree.Element) -> str:
    """Return the text of a string, without how it is pronounced."""
    pieces = []
    for part in element:
        name = _local_name(part)
        if name == "t":
            pieces.append(part.text or "")
        elif name in ("r", "is"):
            pieces.append(_text_of(part))
    return "".join(pieces)


def _elements(archive: zipfile.ZipFile, part: str) -> Iterator[tuple[str, ElementTree.Element]]:
    """Yield the elements of a part of the archive as they end, by their names; none of a part that
    is not there."""
    if part not in archive.NameToInfo:
        return
    content: IO[bytes]
    with archive.open(part) as content:
        parents: list[ElementTree.Element] = []
        for event, element in ElementTree.iterparse(content, ("start", "end")):
            if event == "start":
                parents.append(element)
                continue
            parents.pop()
            name = _local_name(element)
            yield name, element
            if parents and name in ("row", "si"):
                # What has been read is not held.
                parents[-1].remove(element)


def _local_name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


FORMATS = (
    Format((".xlsx", ".xlsm"), read_workbook, runs=Runs.GUARDED, is_text=False, has_rows=True),
)
