"""Small whole files of every format, as programs write them."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import zipfile

import zstandard

from farspan.corpus.pandoc import find_pandoc

MARKDOWN = """\
---
title: The Great Title
author: [Ann B, Carl D]
date: 2024-03-01
---

# The first heading

The harbour wall has a rowan growing near it, and a note[^1].

[^1]: A note below.

## A deeper heading

| name | year |
|------|------|
| Ann  | 2001 |

- an item
- another item
"""
#: pandoc's names of what it writes, by the endings that farspan reads.
CONVERTED = {
    ".docx": "docx",
    ".pptx": "pptx",
    ".odt": "odt",
    ".epub": "epub",
    ".rtf": "rtf",
    ".tex": "latex",
    ".nxml": "jats",
    ".fb2": "fb2",
}
XLSX_PARTS = {
    "[Content_Types].xml": (
        '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.'
        'relationships+xml"/><Default Extension="xml" ContentType="application/xml"/>'
        '<Override PartName="/xl/workbook.xml" ContentType="application/vnd.openxmlformats-'
        'officedocument.spreadsheetml.sheet.main+xml"/><Override PartName="/xl/worksheets/'
        'sheet1.xml" ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.'
        'worksheet+xml"/></Types>'
    ),
    "_rels/.rels": (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/'
        'relationships/officeDocument" Target="xl/workbook.xml"/></Relationships>'
    ),
    "xl/workbook.xml": (
        '<workbook xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main" xmlns:r="'
        'http://schemas.openxmlformats.org/officeDocument/2006/relationships"><sheets>'
        '<sheet name="Harbours" sheetId="1" r:id="r1"/></sheets></workbook>'
    ),
    "xl/_rels/workbook.xml.rels": (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/'
        'relationships/worksheet" Target="worksheets/sheet1.xml"/></Relationships>'
    ),
    "xl/worksheets/sheet1.xml": (
        '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'
        '<row r="1"><c r="A1" t="inlineStr"><is><t>harbour</t></is></c>'
        '<c r="B1" t="str"><v>height</v></c>'
        '<c r="C1" t="inlineStr"><is><t>built</t></is></c></row>'
        '<row r="3"><c r="A3" t="s"><v>1</v></c><c r="C3" s="1"><v>45352.5</v></c></row>'
        '<row r="4"><c r="B4"><v>8</v></c><c r="C4" s="1"><v>45353</v></c></row>'
        "</sheetData></worksheet>"
    ),
    "xl/sharedStrings.xml": (
        '<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><si><t>no</t></si>'
        "<si><r><t>the </t></r><r><t>wall</t></r><rPh><t>no</t></rPh></si></sst>"
    ),
    "xl/styles.xml": (
        '<styleSheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><numFmts>'
        '<numFmt numFmtId="170" formatCode="yyyy\\-mm\\-dd"/></numFmts><cellXfs>'
        '<xf numFmtId="0"/><xf numFmtId="170"/></cellXfs></styleSheet>'
    ),
}
MESSAGE = b"""\
From: =?utf-8?q?J=C3=BCrgen?= <j@example.org>
To: ann@example.org
Subject: =?iso-8859-1?Q?Caf=E9_in_the_harbour?=
Date: Fri, 01 Mar 2024 10:00:00 +0100
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="b"

--b
Content-Type: text/plain; charset=utf-8
Content-Transfer-Encoding: quoted-printable

The caf=C3=A9 opens =
at ten.
From now on.

--b
Content-Type: application/pdf; name="menu.pdf"
Content-Disposition: attachment; filename="menu.pdf"
Content-Transfer-Encoding: base64

JVBERi0=
--b--
"""
SUBTITLES = """\
1
00:00:01,000 --> 00:00:02,000
The <i>harbour</i> wall
has a rowan.

2
00:00:03,000 --> 00:00:04,000
A second line.
"""
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# A notebook\n", "\n", "Its text."]},
        {
            "cell_type": "code",
            "metadata": {},
            "execution_count": 1,
            "source": "# no heading\nprint(1)",
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["one\n"]},
                {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {"image/png": "iVBORw0KGgo=", "text/plain": ["<Figure>"]},
                },
            ],
        },
    ],
    "metadata": {"language_info": {"name": "python"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}
CODE = "class Harbour(object):\n    def wall(self):\n        return 1\n\n\ndef rowan():\n    pass\n"


def converted(ending: str) -> bytes:
    """The document above as pandoc writes it."""
    pandoc = find_pandoc()
    assert pandoc is not None
    command = [pandoc.path, "--standalone", "--from", "markdown", "--to", CONVERTED[ending]]
    done = subprocess.run([*command, "-o", "-"], input=MARKDOWN.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def zipped(parts: dict[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def with_standard_library() -> dict[str, bytes]:
    """Files that need no converter, by their endings."""
    begin = b"From j@example.org Fri Mar  1 10:00:00 2024\n"
    escaped = MESSAGE.replace(b"\nFrom now", b"\n>From now")
    mailbox = begin + escaped + b"\n" + begin + b"Subject: Second\n\nA rowan.\n"
    files = {
        ".txt": b"The harbour wall has a rowan.\n",
        ".md": b"# The heading\n\nThe harbour wall.\n",
        ".rst": b"The heading\n===========\n\nThe harbour wall.\n",
        ".org": b"#+title: The title\n\n* TODO The heading :tag:\n\nThe harbour wall.\n",
        ".adoc": b"= The title\n\n== The heading\n\n----\n== no heading\n----\n",
        ".html": b"<title>The title</title><h1>The heading</h1><p>The harbour wall.</p>",
        ".jsonl": b'{"text": "The harbour wall.", "title": "One"}\n{"text": "A rowan."}\n',
        ".json": b'{"about": "x", "rows": [{"text": "The harbour wall."}, {"text": "A rowan."}]}',
        ".csv": b'Name,Abstract,Year\n"Ann, B","two\nlines ""q""",2001\nCarl,single,2002\n',
        ".tsv": b"id\ttext\n1\tThe harbour wall.\n2\tA rowan.\n",
        ".ipynb": json.dumps(NOTEBOOK).encode(),
        ".eml": MESSAGE,
        ".mbox": mailbox,
        ".srt": SUBTITLES.encode(),
        ".vtt": b"WEBVTT\n\n00:01.000 --> 00:02.000\n<v Ann>The harbour wall.\n",
        ".py": CODE.encode(),
        ".c": b"struct wall {\n  int height;\n};\n",
        ".sql": b"-- the harbour\nSELECT wall FROM harbour;\n",
        ".sh": b"#!/bin/sh\n# the harbour\necho wall\n",
        ".f90": b"subroutine wall(x)\nend subroutine\n",
        ".jl": b"function wall(x)\nend\n",
    }
    files[".xlsx"] = zipped(dict(XLSX_PARTS))
    packed = {f"{end}.gz": gzip.compress(files[end]) for end in (".txt", ".md", ".json", ".csv")}
    packed |= {f"{end}.zst": zstandard.compress(files[end]) for end in (".txt", ".py", ".mbox")}
    members = {f"folder/a{end}": content for end, content in files.items()}
    return files | packed | {".zip": zipped(members)}


def with_converter() -> dict[str, bytes]:
    """Files that pandoc converts, by their endings."""
    files = {ending: converted(ending) for ending in CONVERTED}
    files[".xml"] = files[".nxml"]
    return files
