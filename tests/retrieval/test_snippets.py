"""Snippets show what was asked for, in any script; marks leave out stop words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.retrieval.snippets import SNIPPET_CHARS, find_marks, make_snippet
from farspan.retrieval.text_cuts import is_inside_character
from farspan.retrieval.words import WordRules, Words

WORDS = Words(WordRules(languages=("en", "de")))


def snippet(text: str, query: str) -> str:
    return make_snippet(text, query, WORDS)


def marked(text: str, query: str) -> list[str]:
    return [text[start:stop] for start, stop in find_marks(text, query, WORDS)]


def test_snippets_are_short_and_show_what_was_asked_for():
    text = "word " * 200 + "the cross_entropy loss " + "tail " * 200
    cut = snippet(text, "CrossEntropy")
    assert len(cut) <= SNIPPET_CHARS + 4 and "the cross_entropy loss" in cut
    assert cut.startswith("… word") and cut.endswith("tail …")
    assert snippet("a short\n  text", "nothing") == "a short text"
    assert "the port is 80" in snippet("the " * 300 + "port is 80 " + "and " * 300, "the port")


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("港の壁のそばに木が生えている。" * 30, "港"),
        ("港の壁のそばに木が生えている。" * 30 + "林檎の木。", "林檎"),
        ("เมื่อวานเราเห็นในหุบเขา" * 30 + "ประภาคาร" + "แล้วทุกคนดีใจมาก" * 30, "ประภาคาร"),
        ("QmFzZTY0IGlzIGxvbmcu" * 50, "QmFzZTY0"),
        ("see https://example.org/" + "a1/" * 200 + "harbour", "harbour"),
        ("x" * 1000, "y"),
    ],
)
def test_text_without_spaces_has_a_snippet(text, query):
    cut = snippet(text, query)
    assert SNIPPET_CHARS - 60 <= len(cut) <= SNIPPET_CHARS + 4
    assert query in cut or query == "y"


PIECES = ["the ports ", "港の壁", "กิน", "e\u0301", "👩\u200d🔬", "🇫🇮🇩🇪", "ﾊﾟ", "क्षि", "。", "x"]


@given(
    st.lists(st.sampled_from(PIECES), min_size=100, max_size=300).map("".join),
    st.sampled_from(["ports", "壁", "กิน", "パ", "q"]),
)
def test_a_snippet_is_text_of_the_passage_cut_between_characters(text, query):
    cut = snippet(text, query)
    shown = cut.removeprefix("… ").removesuffix(" …")
    line = " ".join(text.split())
    assert 0 < len(shown) <= SNIPPET_CHARS and shown in line
    start = line.index(shown)
    assert not is_inside_character(line, start)
    assert not is_inside_character(line, start + len(shown))


def test_stop_words_are_not_marked():
    english = "It is the port that the server listens on, and the address of the server."
    german = "Die Adresse ist die des Servers, und der Server wartet an dem Port auf die Anfragen."
    assert marked(english, "the port of the server") == ["port", "server", "server"]
    assert marked(german, "die Adresse und der Server") == ["Adresse", "Servers", "Server"]
    # English `die` is a word of its meaning; a query of nothing else keeps its stop words.
    assert marked("The plants die where the water is cold and the sun is low.", "die") == ["die"]
    assert marked(english, "the and") == ["the", "the", "and", "the", "the"]
