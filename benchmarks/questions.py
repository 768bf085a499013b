"""Corpora with questions that people asked, each judged by the section that answered it.

    python -m benchmarks.questions FOLDER [ROOT]   # writes them, one folder for each corpus

A corpus is a manual cut at its headings, one document for each section. Sections of its FAQ have a
question as heading: the question is the query, the section without it is what answers; what else
the FAQ has is left out, since it lists the questions. The other sections keep their headings as
titles. Nothing is chosen on these questions.

The texts are Debian's packages perl-doc, python3-doc, r-doc-html, and debian-faq with
debian-reference-en, debian-handbook, debian-policy and developers-reference. ROOT is the folder
that they are unpacked in (`dpkg -x`), `/` where they are installed.
"""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from farspan.domain.corpus import Document
from farspan.retrieval.queries import Query

#: Words that a section has at least. Shorter ones name others or say nothing.
MIN_WORDS = 8
#: Sections of a corpus at most. Those beyond are left out at random, answers never.
MAX_DOCUMENTS = 1_500
#: Characters of a section at most. Longer ones are listings.
MAX_CHARACTERS = 12_000
#: Headings above sections that say nothing of a subject.
EMPTY_HEADINGS = (
    *("AUTHOR", "AUTHORS", "COPYRIGHT", "LICENSE", "SEE ALSO", "Table of Contents"),
    *("Next topic", "Previous topic", "This Page", "Navigation", "Contents"),
)
_HEADING = re.compile(r"<h([1-6])\b[^>]*>(.*?)</h\1>", re.S | re.I)
_LEFT_OUT = re.compile(r"<(script|style|head|nav)\b.*?</\1>", re.S | re.I)
#: Texinfo repeats the headings of neighbours before each section.
_NEIGHBOURS = re.compile(r'<div class="header">.*?</div>', re.S)
_BLOCK = re.compile(
    r"</?(p|div|li|dt|dd|tr|pre|ul|ol|dl|table|section|br|blockquote)\b[^>]*>", re.I
)
_TAG = re.compile(r"<[^>]+>")
#: "Chapter 3.", "7.31", "A.2.": what numbers a heading.
_NUMBER = re.compile(r"^(Chapter\s+)?[A-Z0-9]?[\d.]*\d\.?\s+(?=\S)")


class Section(NamedTuple):
    """A part of a manual below one heading."""

    file: str
    heading: str
    text: str
    #: Whether the file is one that answers questions.
    is_faq: bool


class QuestionCorpus(msgspec.Struct, frozen=True):
    """Documents of a manual, and the questions that some of them answer."""

    name: str
    documents: list[Document]
    questions: list[Query]


def read_perl(root: Path) -> Iterator[Section]:
    """Yield the sections of Perl's manual; perlfaq answers questions."""
    for pod in sorted({path.resolve() for path in root.glob("usr/share/perl/5*/**/*.pod")}):
        if pod.stem == "perltoc":
            continue
        parts = re.split(r"^=head[1-4] +(.*)$", pod.read_text(errors="replace"), flags=re.M)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True):
            text = pod_text(_without_commands(body))
            title = pod_text(heading).strip()
            yield Section(pod.stem, title, text, pod.stem.startswith("perlfaq"))


def _without_commands(pod: str) -> str:
    """Return POD with items as lines, and no other command."""
    pod = re.sub(r"^=item +(\S.*)$", r"\1", pod, flags=re.M)
    return re.sub(r"^=(over|back|cut|begin|end|for|encoding|pod|item ?\*?).*$", "", pod, flags=re.M)


def pod_text(pod: str) -> str:
    """Return the text of POD without the codes of its letters, which stand up to three deep."""
    pod = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", pod, flags=re.S)
    for _ in range(3):
        pod = re.sub(r"[BCIFLSX]<(?:([^<>|]*)\|)?([^<>]*)>", lambda code: code[1] or code[2], pod)
    return pod.replace("E<lt>", "<").replace("E<gt>", ">")


def read_python(root: Path) -> Iterator[Section]:
    """Yield the sections of Python's manual; its FAQ answers questions."""
    for manual in sorted(root.glob("usr/share/doc/python3.*/html"))[:1]:
        for page in sorted(manual.rglob("*.html")):
            folder = page.relative_to(manual).parts[0]
            if folder in PYTHON_PARTS:
                name = str(page.relative_to(manual).with_suffix(""))
                yield from read_html_sections(page, name, folder == "faq")


PYTHON_PARTS = ("faq", "howto", "library", "reference", "tutorial", "using", "extending", "c-api")


def read_r(root: Path) -> Iterator[Section]:
    """Yield the sections of R's manuals; R-FAQ answers questions."""
    for page in sorted(root.glob("usr/share/R/doc/manual/R-*.html")):
        yield from read_html_sections(page, page.stem, page.stem == "R-FAQ")


def read_debian(root: Path) -> Iterator[Section]:
    """Yield the sections of Debian's manuals; its FAQ answers questions."""
    docs = root / "usr/share/doc"
    pages = [(page, True) for page in sorted((docs / "debian/FAQ").glob("*.en.html"))]
    manuals = [
        *sorted((root / "usr/share/debian-reference").glob("ch*.en.html")),
        *sorted((docs / "debian-handbook/html/en-US").glob("*.html")),
        *sorted((root / "usr/share/developers-reference").glob("*.html")),
        *sorted((docs / "debian-policy/policy.html").glob("*.html")),
    ]
    pages += [(page, False) for page in manuals]
    for page, is_faq in pages:
        if not page.stem.startswith(("index", "search", "genindex")):
            yield from read_html_sections(page, page.stem.removesuffix(".en"), is_faq)


CORPORA: dict[str, Callable[[Path], Iterator[Section]]] = {
    "perl": read_perl,
    "python": read_python,
    "r": read_r,
    "debian": read_debian,
}


def installed_corpora(root: Path) -> list[str]:
    """Return the corpora whose text is there, with its FAQ."""
    return [name for name, read in CORPORA.items() if any(part.is_faq for part in read(root))]


def read_html_sections(page: Path, file: str, is_faq: bool) -> Iterator[Section]:
    """Yield the parts of an HTML page between its headings."""
    markup = _NEIGHBOURS.sub("", _LEFT_OUT.sub("", page.read_text(errors="replace")))
    parts = _HEADING.split(markup)
    for heading, body in zip(parts[2::3], parts[3::3], strict=True):
        title = _NUMBER.sub("", " ".join(html_text(heading).split()))
        yield Section(file, title, html_text(body), is_faq)


def html_text(markup: str) -> str:
    """Return the text of HTML, each block on lines of its own."""
    text = html.unescape(_TAG.sub("", _BLOCK.sub("\n", markup))).replace("¶", "")
    lines = [re.sub(r"[ \t\xa0]+", " ", line).strip() for line in text.splitlines()]
    return "\n".join(lines)


def load_corpus(name: str, root: Path = Path("/")) -> QuestionCorpus:
    """Return a corpus with its questions."""
    sections = []
    for section in CORPORA[name](root):
        text = re.sub(r"\n{3,}", "\n\n", section.text).strip()
        if len(text.split()) < MIN_WORDS or len(text) > MAX_CHARACTERS:
            continue
        if section.heading in EMPTY_HEADINGS:
            continue
        if not section.is_faq or section.heading.rstrip().endswith("?"):
            sections.append(section._replace(text=text))
    documents = []
    questions = []
    for number, section in enumerate(choose_sections(sections)):
        origin = f"{section.file}-{number:04}.md"
        if section.is_faq:
            questions.append(Query(section.heading, (number,), "own"))
            document = Document(text=section.text, origin=origin, title=origin.removesuffix(".md"))
        else:
            text = f"{section.heading}\n\n{section.text}"
            document = Document(text=text, origin=origin, title=section.heading)
        documents.append(document)
    return QuestionCorpus(name, documents, questions)


def choose_sections(sections: Sequence[Section]) -> list[Section]:
    """Return at most MAX_DOCUMENTS sections, in order, with all that answer questions."""
    generator = np.random.default_rng(0)
    others = [number for number, section in enumerate(sections) if not section.is_faq]
    kept = max(MAX_DOCUMENTS - (len(sections) - len(others)), 0)
    dropped = {int(number) for number in generator.permutation(others)[kept:]}
    return [section for number, section in enumerate(sections) if number not in dropped]


def file_name(document: Document) -> str:
    """Return the name of the file that a document is written to."""
    return document.origin.replace("/", "-")


def write(corpus: QuestionCorpus, folder: Path) -> None:
    """Write the documents as files, and the questions beside them, with what answers each."""
    texts = folder / "documents"
    texts.mkdir(parents=True, exist_ok=True)
    for document in corpus.documents:
        heading = "# " if document.text.startswith(f"{document.title}\n") else ""
        (texts / file_name(document)).write_text(f"{heading}{document.text}\n")
    queries = []
    judged = []
    for number, query in enumerate(corpus.questions):
        queries.append(msgspec.json.encode({"_id": f"q{number}", "text": query.text}).decode())
        answer = file_name(corpus.documents[query.relevant[0]])
        judged.append(f"q{number}\t{answer}\t1")
    (folder / "queries.jsonl").write_text("\n".join(queries) + "\n")
    (folder / "qrels.tsv").write_text("\n".join(judged) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("root", type=Path, nargs="?", default=Path("/"))
    given = parser.parse_args()
    for name in installed_corpora(given.root):
        corpus = load_corpus(name, given.root)
        write(corpus, given.folder / name)
        print(f"{name}: {len(corpus.documents):,} documents, {len(corpus.questions)} questions")
