"""Text and titles of PDF files, as people search for them.

A page shows a word that a line end breaks in two with a hyphen; it is one word. What programs write
where nobody named a title is none.
"""

from __future__ import annotations

import re

#: Hyphens that a line may end with: ASCII's, the soft one and Unicode's.
_HYPHENS = "-\u00ad\u2010"
#: A hyphen and the end of its line or page, with a letter on the next.
_BREAK = re.compile(rf"(?<=[^\W\d_])[{_HYPHENS}][ \t]*(?P<end>\n[ \t]*\f|[\n\f])[ \t]*(?=[^\W\d_])")
_LETTERS = re.compile(r"[^\W\d_]+")
_WORD = re.compile(rf"[^\W\d_]+(?:[{_HYPHENS}][^\W\d_]+)*")
_LAST_WORD = re.compile(rf"[{_HYPHENS}\w./@:]*\Z")
_BLANK = re.compile(r"[ \t]+|[\n\f]")
#: Characters on either side of a line end that are looked at: no word of a language is longer.
MAX_WORD_CHARS = 64
#: First and last parts of words that keep their hyphens, whatever the rest is.
_FIRST_PARTS = frozenset(
    ["self", "well", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
)
_LAST_PARTS = frozenset(["based", "related", "term", "level", "specific", "oriented", "driven"])
#: Words that a hyphen before them does not belong to, as in `pre- and postwar`.
_JOINING_WORDS = frozenset(["and", "or", "und", "oder", "bis", "et", "ou", "y", "o", "e"])
#: Letters that fonts draw as one.
_LIGATURES = str.maketrans(
    {
        "\ufb00": "ff",
        "\ufb01": "fi",
        "\ufb02": "fl",
        "\ufb03": "ffi",
        "\ufb04": "ffl",
        "\ufb05": "st",
        "\ufb06": "st",
    }
)

#: Titles that programs write by themselves, without regard to case.
_DEFAULT_TITLE = re.compile(
    r"""
      microsoft\ (?:office\ )?(?:word|powerpoint|excel|visio|publisher|outlook|access)
      (?:\ (?:document|dokument|presentation|worksheet))?(?:\ -.*)?
    | (?:untitled|unnamed|unknown|anonymous|\(anonymous\)|no\ title|none|null|title|document\ title)
      (?:[ _-]?(?:document|presentation|page)?[ _-]?\d*)
    | unbenannt|ohne\ titel|unbekannt|sans\ titre|sans\ nom|s[ie][nm]\ t[íi]tulo|senza\ titolo
    | 无标题|無題
    | (?:new\ )?(?:document|dokument|documento|doc|presentation|pr[äa]sentation|pr[ée]sentation
      |presentaci[óo]n|slide|folie|diapositive|book|mappe|classeur|libro|sheet|drawing|layout|page
      |scan|scanned\ (?:document|image)|image|img|print|file)[ _-]?\d*
    | powerpoint[ -](?:presentation|pr[äa]sentation)|pr[ée]sentation\ powerpoint
    | presentaci[óo]n\ de\ powerpoint|presentazione\ (?:standard\ )?(?:di\ )?powerpoint
    | (?:click\ to\ (?:add|edit)\ .*)
    | (?:doi|pii|isbn)[:\ ]\s*[\w./():-]+
    | (?:[a-z]:\\|\\\\|file:|https?://|/(?:home|users|tmp|var|mnt)/).*
    | .+\.(?:docx?|dotx?|odt|rtf|tex|dvi|pdf|ps|eps|pptx?|ppsx?|odp|xlsx?|xlsm|ods|csv|indd|qxd|qxp
      |pmd|p65|fm|wpd|wps|ai|cdr|vsdx?|tiff?|jpe?g|png|dwg)
    | \S+\.(?:txt|html?|xml|md|rst|pub|pages|key|numbers)
    | [\W_]*
    """,
    re.IGNORECASE | re.VERBOSE,
)
#: A first line is a title if it has so many characters and words.
_TITLE_CHARS = (4, 150)
_TITLE_WORDS = 2


def is_default_title(title: str) -> bool:
    """Return True for a title that names a program, a file or nothing."""
    # Longer ones are sentences of a person's.
    return len(title) > 300 or _DEFAULT_TITLE.fullmatch(" ".join(title.split())) is not None


def pdf_title(metadata: str | None, text: str, stem: str) -> str:
    """Return the title in a PDF's metadata; where that is a program's default, the first line
    of its text if that reads as one. Else the file's name."""
    # pypdf's texts are of a type of their own.
    given = " ".join(str(metadata or "").split())
    if given and not is_default_title(given):
        return given
    least, most = _TITLE_CHARS
    first_line = re.split(r"[\n\f]", text.lstrip()[: 2 * most], maxsplit=1)[0]
    first = " ".join(first_line.split())
    is_title = least <= len(first) <= most and not is_default_title(first)
    has_words = len(_LETTERS.findall(first)) >= _TITLE_WORDS
    return first if given and is_title and has_words else stem


def join_broken_words(text: str) -> str:
    """Join the words that ends of lines or pages break; the line then ends behind
    the word. Ligatures become letters.

    A hyphen stays where the text has the word with it elsewhere, in compounds that have one by
    rule, and next to capitals and numbers. In time and memory linear in the text.
    """
    text = text.translate(_LIGATURES)
    breaks = list(_BREAK.finditer(text))
    if not breaks:
        return text.replace("\u00ad", "-")
    words = {word.translate(_PLAIN_HYPHENS) for word in _WORD.findall(text.lower())}
    joined = _Joined()
    position = 0
    for match in breaks:
        joined.add(text[position : match.start()])
        position = match.start()
        tail = _LETTERS.match(text, match.end(), match.end() + MAX_WORD_CHARS)
        assert tail is not None
        middle = _joining_mark(joined.last_word(), tail[0], words)
        if middle is not None:
            joined.join(middle, match["end"].lstrip("\n \t") or "\n")
            position = match.end()
    joined.add(text[position:])
    return joined.text().replace("\u00ad", "-")


_PLAIN_HYPHENS = str.maketrans(dict.fromkeys(_HYPHENS, "-"))


def _joining_mark(head: str, tail: str, words: set[str]) -> str | None:
    """Return the joint of two halves of a word in one line: nothing or a hyphen. None where they
    are two words."""
    compound, _, last = head.rpartition("-")
    if not last.isalpha() or not tail.islower():
        return None
    whole = (last + tail).lower()
    hyphenated = f"{head}-{tail}".lower()
    if whole in words:
        return ""
    if compound:
        # As in `state-of-the-art`, and not in `non-governmental`.
        return "-" if last.lower() in words else ""
    if hyphenated in words:
        return "-"
    if tail in _JOINING_WORDS:
        return None
    if last.isupper() or last.lower() in _FIRST_PARTS or tail in _LAST_PARTS:
        return "-"
    return ""


class _Joined:
    """Text as it is put together. The end of a line within a word is moved behind that."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        #: The end of the line or page that is to come behind the present word.
        self._end = ""
        self._tail = ""

    def add(self, piece: str) -> None:
        blank = _BLANK.search(piece) if self._end else None
        if blank is not None:
            is_line_end = blank[0] in "\n\f"
            end = self._end if not is_line_end or self._end == "\f" else ""
            rest = blank.start() if is_line_end else blank.end()
            piece = piece[: blank.start()] + end + piece[rest:]
            self._end = ""
        self._append_piece(piece)

    def join(self, middle: str, end: str) -> None:
        """Join the word whose second part is added next; `end` is that of its line."""
        self._append_piece(middle)
        self._end = "\f" if "\f" in (end, self._end) else end

    def _append_piece(self, piece: str) -> None:
        self._pieces.append(piece)
        self._tail = (self._tail + piece[-MAX_WORD_CHARS:])[-MAX_WORD_CHARS:]

    def last_word(self) -> str:
        """Return the letters before a hyphen, with those before the word's other
        hyphens."""
        match = _LAST_WORD.search(self._tail)
        assert match is not None
        return match[0].translate(_PLAIN_HYPHENS)

    def text(self) -> str:
        return "".join(self._pieces) + self._end.replace("\n", "")
