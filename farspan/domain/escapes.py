"""Names and texts from elsewhere, made safe: to show on a terminal, to paste into a shell, to write
into YAML."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath

#: What a terminal obeys instead of showing it: C0 but tab and newline, DEL, C1, line and paragraph
#: separators, bidirectional overrides and isolates. Half of a surrogate pair, as Python has bytes
#: of file names that are not UTF-8, cannot be printed at all.
_UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[{_UNSAFE}]")
_CONTROLS_OR_BREAKS = re.compile(f"([\t\n{_UNSAFE}]+)")
#: A colour or a style (ECMA-48's SGR), or a control character.
_STYLE_OR_CONTROL = re.compile(rf"\x1b\[[0-9;]*m|[{_UNSAFE}]")
#: A text that YAML reads as itself without quotes, also between braces, but for `_YAML_KEYWORDS`.
_PLAIN_YAML = re.compile(r"(?:~/|hf:)?[A-Za-z_./][A-Za-z0-9_./+@-]*")
_YAML_KEYWORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "."}
#: A key of a file, such as `stages[0].layers`: brackets match names of files at most.
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.\[\]-]+")
#: Characters that need no escape in a double-quoted YAML text and mean nothing to a shell there.
_PLAIN_IN_QUOTES = re.compile(r"[A-Za-z0-9_./ +@:,=-]")


def escape_controls(text: str, *, keep_styles: bool = False) -> str:
    r"""`text` with control characters shown as escapes such as `\x1b`, for a terminal.

    Lines and tabs stay. With `keep_styles` colours stay too: for text whose parts are escaped.
    """
    if keep_styles:
        return _STYLE_OR_CONTROL.sub(_escape_unless_style, text)
    return _CONTROL.sub(_escape_match, text)


def escape_json_controls(json: str) -> str:
    r"""JSON text with control characters inside its strings as `\u001b`, the same value."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json)


def one_line(text: str) -> str:
    r"""`text` with its line breaks as `\n`: a name cannot begin a line of its own."""
    return text.replace("\n", "\\n")


def shell_word(word: object) -> str:
    r"""One word of a shell's command line, quoted where it must be: `'it is'`, `x$'\033'`.

    Control characters become `$'\033'`, as `ls` shows them: the word has one line, and bash and zsh
    read the same name. A path that begins with a dash gets `./`, so that no program takes it for an
    option.
    """
    text = str(word)
    if isinstance(word, PurePath) and text.startswith("-"):
        text = f"./{text}"
    # Every second piece is one of control characters; empty pieces stand around those at the ends.
    quoted = []
    for place, piece in enumerate(_CONTROLS_OR_BREAKS.split(text)):
        if place % 2:
            quoted.append(_quote_octal(piece))
        elif piece:
            quoted.append(shlex.quote(piece))
    return "".join(quoted) or "''"


def shell_line(*words: object) -> str:
    """Words of a shell's command line, each quoted where it must be."""
    return " ".join(map(shell_word, words))


def key_word(key: str) -> str:
    """Quote a key of a file for a shell, unless it is made of names and places."""
    return key if _PLAIN_KEY.fullmatch(key) else shell_word(key)


def yaml_word(value: object) -> str:
    """Write a text as a YAML value, quoted where it must be; a shell runs nothing of it either."""
    text = str(value)
    if not isinstance(value, str | PurePath):
        return text  # A number, true or false.
    if _PLAIN_YAML.fullmatch(text) and text.lower() not in _YAML_KEYWORDS:
        return text
    if not _CONTROLS_OR_BREAKS.search(text):
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(map(_escape_yaml_char, text)) + '"'


def _escape_match(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _escape_unless_style(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else _escape_match(match)


def _quote_octal(controls: str) -> str:
    """Write control characters as `$'...'`, byte by byte."""
    octal = ""
    for char in controls:
        errors = "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass"
        for byte in char.encode(errors=errors):
            octal += f"\\{byte:03o}"
    return f"$'{octal}'"


def _escape_yaml_char(char: str) -> str:
    return char if _PLAIN_IN_QUOTES.fullmatch(char) else f"\\U{ord(char):08x}"
