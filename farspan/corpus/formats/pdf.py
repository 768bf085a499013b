"""PDF files: the text of their pages, and how many have none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from farspan.corpus.formats._format import Format, Needs, Runs
from farspan.corpus.reading import MAX_DOCUMENT_BYTES, TOO_LONG, ReadOptions, UnreadableFile
from farspan.domain.corpus import Document, Skipped

#: Why a file is left out, and why pages of one are.
NO_TEXT = "no text in it, perhaps a scan"
NO_TEXT_ON_PAGES = "no text"


def read_pdf(file: Path, options: ReadOptions) -> Iterator[Document | Skipped | None]:
    """Read the text of a file, a form feed between pages."""
    import pypdf

    from farspan.corpus._pdf import join_broken_words, pdf_title

    reader = pypdf.PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableFile("needs a password")
    title = reader.metadata.title if reader.metadata else None
    pages: list[str] = []
    chars = blank = 0
    for page in reader.pages:
        pages.append(page.extract_text())
        blank += not pages[-1].strip()
        chars += len(pages[-1])
        if chars > MAX_DOCUMENT_BYTES:
            raise UnreadableFile(TOO_LONG)
        # Each page may take as long as a document.
        yield None
    if blank == len(pages):
        detail = f"{blank} pages" if blank > 1 else ""
        yield Skipped.file(file, NO_TEXT, detail)
        return
    if blank:
        yield Skipped(
            reason=NO_TEXT_ON_PAGES,
            path=str(file),
            detail=f"{blank} of {len(pages)} pages",
            kinds={".pdf (pages)": blank},
        )
    text = join_broken_words("\f".join(pages))
    title = pdf_title(title, text, options.stem(file))
    yield Document(title=title, text=text, origin=str(file), page=1)


def _has_pypdf() -> bool:
    return importlib.util.find_spec("pypdf") is not None


FORMATS = (
    Format(
        (".pdf",),
        read_pdf,
        runs=Runs.GUARDED,
        is_text=False,
        needs=Needs(_has_pypdf, "pdf"),
        read_as="whole words",
    ),
)
