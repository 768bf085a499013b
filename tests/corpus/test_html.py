"""HTML pages as a reader sees them: what an author forgot to close swallows nothing, sentences stay
whole, and headings are those of the page."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from farspan.corpus._html import read_html
from farspan.corpus.documents import PART_CHARS, cut_document
from farspan.corpus.sources import open_source
from farspan.domain.corpus import Document


def read(tmp_path: Path, page: str) -> Document:
    (tmp_path / "page.html").write_bytes(page.encode())
    (document,) = open_source(str(tmp_path)).documents()
    return document


@pytest.mark.parametrize(
    "page",
    [
        "<body><nav><ul><li>menu</ul><p>Body text one.</p><p>Body text two.</p></body></html>",
        "<html><head><title>T</head><body><p>Body text one.</p><p>Body text two.</body></html>",
        "<body><svg><path d='x'/><p>Body text one.</p><p>Body text two.</p></body>",
        "<script>var x = 1;<p>Body text one.</p><p>Body text two.</p>",
        "<style>p { color: red }<p>Body text one.</p><p>Body text two.</p>",
        "<noscript>no script<p>Body text one.</p><p>Body text two.</p>",
        "<template>t<p>Body text one.</p><p>Body text two.</p>",
        "<iframe src=x>frame<p>Body text one.</p><p>Body text two.</p>",
        "<textarea>typed<p>Body text one.</p><p>Body text two.</p>",
        "<script src='x.js'/><p>Body text one.</p><script>y()</script><p>Body text two.</p>",
        "<title/><p>Body text one.</p><p>Body text two.</p>",
        "<p>Body text one.</p><!-- never closed <p>Body text two.</p>",
        "<!-- never closed <p>Body text one.</p><p>Body text two.</p>",
        '<a href="never closed>link</a><p>Body text one.</p><p>Body text two.</p>',
        "<a href='never closed>link</a><p>Body text one.</p><p>Body text two.</p>",
        "<div><nav>menu</div><p>Body text one.</p></nav><p>Body text two.</p>",
        "<plaintext><p>Body text one.</p><p>Body text two.</p>",
        "<pre>code\n  more<p>Body text one.</p><p>Body text two.</p>",
        "<h2>Head<p>Body text one.</p><p>Body text two.</p>",
        "<script><!-- <script> </script><p>Body text one.</p><p>Body text two.</p>",
    ],
)
def test_what_is_never_closed_swallows_nothing(page: str, tmp_path: Path) -> None:
    lines = read(tmp_path, page).text.split("\n")
    assert {"Body text one.", "Body text two."} <= set(lines)


def test_what_is_closed_and_not_shown_is_left_out(tmp_path: Path) -> None:
    page = (
        "<title>T</title><nav>no<nav>no</nav>no</nav>"
        "One <svg><title>no</title><text>no</text></svg>two<script>no</script><style>no</style>"
        "<noscript>no</noscript><template>no</template> three<iframe>no</iframe><!-- no -->"
        "<!doctype html>."
    )
    document = read(tmp_path, page)
    assert (document.title, document.text) == ("T", "One two three.")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("a <del>old</del> <ins>new</ins> z", "a old new z"),
        ("a <label>name <input> b</label> z", "a name b z"),
        ("so <math><mi>x</mi><mo>=</mo><mn>1</mn></math> is", "so x=1 is"),
        ("<math><mtr><mtd>1</mtd><mtd>2</mtd></mtr></math>", "1 2"),
        ("a <ruby>漢<rt>kan</rt></ruby>字 z", "a 漢kan字 z"),
        ("a <img alt=b src=c> <button>d</button> <output>e</output> z", "a d e z"),
        ("a <custom-name>b</custom-name><unknown>c</unknown> z", "a bc z"),
        ("a <nobr>b</nobr> <big>c</big> <strike>d</strike> <acronym>e</acronym> z", "a b c d e z"),
        (
            "a <data>b</data> <meter>c</meter> <object>d</object> <picture><source></picture>z",
            "a b c d z",
        ),
        ("mail <script>x()</script> us", "mail us"),
        ("a<wbr>b<p>c<br>d", "ab\n\nc\nd"),
        ("<table><tr><td>a<td>b<tr><td>c</table>", "a\nb\n\nc"),
        ("<p>x</p><![CDATA[ y ]]><p>z</p>", "x\n\ny\n\nz"),
        ("<![CDATA[ a > b & <c> ]]>d", "a > b & <c> d"),
        ("<![CDATA[never closed<p>b", "never closed\n\nb"),
        ("<script>//<![CDATA[\nx()\n//]]></script>a", "a"),
        ("a &amp; b &lt;p&gt; caf&eacute; 1 < 2 & 3 > 2 AT&T", "a & b <p> café 1 < 2 & 3 > 2 AT&T"),
        ("a &#13; b&#0;", "a b\ufffd"),
        ("<pre>\n  one\n\n\n\ntwo  \n</pre>x", "one\n\ntwo\n\nx"),
        ("<textarea>a &lt;b></textarea>", "a <b>"),
        ("", ""),
        (" \n <p>", ""),
        ("a <", "a <"),
        ("a </", "a"),
        ("a <b", "a"),
    ],
)
def test_elements_in_a_line_stay_in_it(page: str, text: str, tmp_path: Path) -> None:
    assert read(tmp_path, page).text == text


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("<h1>Site name</h1><h1>Real head</h1>", "Site name"),
        ("<h1></h1><h1>Real <b>head</b></h1>", "Real head"),
        ("<h1>Never closed<p>text<h1>Next</h1>", "Never closed"),
        ("<nav><h1>Menu</h1></nav><h1>Head</h1>", "Head"),
        ("<title> A \n B </title><title>C</title><h1>D</h1>", "A B"),
        ("<svg><title>Icon</title></svg><title>Page</title>", "Page"),
        ("<p>text", "page"),
    ],
)
def test_the_title_is_one_title_or_one_heading(page: str, title: str, tmp_path: Path) -> None:
    assert read(tmp_path, page).title == title


def test_headings_are_those_of_the_page_and_lie_where_they_say(tmp_path: Path) -> None:
    page = (
        "<title>T</title><h1>One</h1># no heading<p>Under\n=====\n"
        "<pre># comment\nCode\n====\n<h2>marked code</h2></pre>"
        "<nav><h2>Menu</h2></nav><h2>Two<br>lines</h2>a<h3><div>Three #</div></h3>b"
        "<pre>never closed\n<h2>Four</h2>c<h4>Five<p>text of five"
    )
    document = read(tmp_path, page)
    headings = document.headings
    assert headings
    assert [(heading.level, heading.title) for heading in headings] == [
        (1, "One"),
        (2, "Two lines"),
        (3, "Three #"),
        (2, "Four"),
        (4, "Five"),
    ]
    for heading in headings:
        line = document.text[heading.start :].split("\n")[0]
        assert line == f"{'#' * heading.level} {heading.title}"
    assert "marked code" in document.text and "## marked" not in document.text


def test_later_parts_of_a_long_page_know_their_headings(tmp_path: Path) -> None:
    paragraph = "<p>" + "word " * 1000
    page = "<h1>Book</h1>" + "".join(
        f"<h2>Chapter {number}</h2>{paragraph * 20}" for number in range(12)
    )
    parts = list(cut_document(read(tmp_path, page)))
    assert len(parts) > 4
    for part in parts:
        above = [heading.title for heading in part.headings or () if heading.start < 0]
        inner = [heading for heading in part.headings or () if heading.start >= 0]
        assert len(part.text) <= PART_CHARS
        for heading in inner:
            assert part.text[heading.start :].startswith(f"{'#' * heading.level} {heading.title}\n")
        if part is not parts[0]:
            assert above[0] == "Book"
            # The chapter above is the one before the first that begins in the part.
            first = int(inner[0].title.split()[1])
            assert above[1:] == [f"Chapter {first - 1}"]


#: Parts of pages, whole and torn.
PIECES = (
    *(
        "<p>",
        "</p>",
        "<div>",
        "</div>",
        "<h1>",
        "</h1>",
        "<h2>",
        "</h3>",
        "<pre>",
        "</pre>",
        "<br>",
    ),
    *(
        "<nav>",
        "<svg>",
        "<title>",
        "<script>",
        "<template>",
        "<textarea>",
        "<table><td>",
        "</table>",
    ),
    *(
        "<b>",
        "</b>",
        "<ul><li>",
        "</ul>",
        "<!--",
        "<![CDATA[",
        "]]>",
        "<a href='",
        '<a href="x',
        "<",
    ),
    *(
        "<script/>",
        "<foreignObject>",
        "&#13;",
        "&amp;",
        "<plaintext>",
        "\n",
        "  ",
        ">",
        "</",
        "<?x",
    ),
)


def test_no_order_of_tags_loses_a_word_or_misplaces_a_heading() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        pieces = rng.choices(PIECES, k=rng.randint(1, 14))
        for number in range(len(pieces)):
            pieces[number] += f" word{number} "
        page = "".join(pieces)
        found = read_html(page)
        assert found.text == found.text.strip() and "\n\n\n" not in found.text
        for heading in found.headings:
            line = found.text[heading.start :].split("\n")[0]
            assert line == f"{'#' * heading.level} {heading.title}", page
        # All but an open comment, tag or script goes on to be read: the last word behind a ">".
        shown = read_html(f"{page}<p>the end")
        assert shown.text.endswith("the end"), page
