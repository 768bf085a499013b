"""Control characters of documents, titles, file names and messages are shown, not sent to the
terminal; farspan's own colours and cursor movements are."""

from __future__ import annotations

import ast
import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from farspan.cli.console import Console, print_traceback
from farspan.cli.display import DisplayConsole
from farspan.cli.paint import paint
from farspan.cli.progress import TrainingDisplay
from farspan.domain.problems import EXIT_CODES
from farspan.domain.run_events import Warned
from farspan.report.tables import table_lines
from tests.cli.conftest import TINY, WORDS, Farspan
from tests.report.fake_run import START, make_plan, started

ROOT = Path(__file__).parents[2]
#: A background that farspan never paints, a title, a screen cleared, a C1 CSI, an override.
HOSTILE = "\x1b[45m\x1b]0;owned\x07\x1b[2J\x9b45m\u202e"
SHOWN = r"\x1b[45m\x1b]0;owned\x07\x1b[2J\x9b45m\u202e"
#: Colours of text, and what rich sends to draw a display again: line up, line erased, cursor hidden
#: or shown, start of the line.
OWN = re.compile(r"\x1b\[(?!45m)[0-9;]*m|\x1b\[(?:1A|2K|\?25[lh])|\r")
#: Where text is printed for people; files here print nothing else than their own answers.
PRINTERS = {"farspan/cli/console.py", "farspan/cli/display.py"}
#: Answers to a program at the other end of a pipe.
PIPES = {
    # Before anything of farspan can be imported.
    "farspan/__main__.py",
    "farspan/domain/cgroup_limits.py",
    "farspan/launch/agent_loop.py",
    "farspan/launch/ray_driver.py",
    "farspan/launch/trial.py",
    "farspan/runtime/checkpoint/checkpoint_folder.py",
    "farspan/runtime/probe_process.py",
    "farspan/runtime/spare.py",
    "farspan_lab/supervisor.py",
}


def unseen(text: str) -> set[str]:
    """Characters that a terminal obeys, but for newline and tab."""
    obeyed = {char for char in text if unicodedata.category(char) in {"Cc", "Zl", "Zp"}}
    return (obeyed | {char for char in text if char in HOSTILE and ord(char) > 0x7F}) - {"\n", "\t"}


def on_terminal(*words: str, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """The exit code of a command, and all that a terminal gets of it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "farspan", *words],
        cwd=cwd,
        env={**env, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    content = b""
    try:
        while piece := os.read(ours, 65536):
            content += piece
    except OSError:  # Linux says so where the other end is closed.
        pass
    os.close(ours)
    return process.wait(), content.decode()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents whose names, titles and texts hold control characters."""
    folder = tmp_path_factory.mktemp("hostile")
    docs = folder / "docs"
    docs.mkdir()
    for number in range(30):
        text = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 150))
        (docs / f"{number:02}.txt").write_text(text)
    text = f"zebra stripes {HOSTILE} zebra\n" * 30
    (docs / f"e{HOSTILE}.txt").write_text(text)
    (docs / "titled.html").write_text(f"<title>zebra {HOSTILE}</title><p>{text}</p>")
    (docs / "titled.md").write_text(f"# zebra {HOSTILE}\n\n{text}")
    (folder / "run.yaml").write_text(TINY)
    return folder


@pytest.mark.slow
def test_commands_on_a_terminal_send_no_control_characters_of_documents(
    hostile: Path, environment: dict[str, str], tmp_path: Path
):
    environment = {**environment, "FARSPAN_CACHE": str(tmp_path / "cache")}
    coloured = set()
    commands = (
        ("prepare",),
        ("train", "run.yaml", "--run", f"run{HOSTILE}"),
        ("embed", f"run{HOSTILE}", "--no-eval"),
        ("search", "zebra stripes", "--run", f"run{HOSTILE}", "--system", "bm25"),
        ("search", "zebra stripes", "--run", f"run{HOSTILE}", "--system", "bm25", "--json"),
        ("generate", f"zebra {HOSTILE}", "--run", f"run{HOSTILE}", "--tokens", "20"),
        ("logs", f"run{HOSTILE}"),
        ("status", f"run{HOSTILE}"),
        ("status", f"run{HOSTILE}", "."),
        ("compare", f"run{HOSTILE}", f"run{HOSTILE}"),
        ("report", f"run{HOSTILE}"),
    )
    for words in commands:
        code, output = on_terminal(*words, cwd=hostile, env=environment)
        assert not unseen(OWN.sub("", output)), (words, output)
        assert code in (0, EXIT_CODES["not-a-run"], EXIT_CODES["usage"]), (words, output)
        if "\x1b[" in output:
            coloured.add(words[0])
        if words[0] == "search":
            assert "owned" in output and "zebra" in output
    assert "train" in coloured


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_refusal_shows_the_control_characters_of_a_name(
    tmp_path: Path, here: Farspan, flags: tuple[str, ...]
):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / f"e{HOSTILE}.jsonl").write_text("{")
    (tmp_path / "run.yaml").write_text(TINY)
    done = here("prepare", *flags, cwd=tmp_path)
    assert done.returncode and SHOWN in done.stderr
    assert not unseen(done.stdout + done.stderr)
    if flags:
        assert HOSTILE in msgspec.json.decode(done.stdout)["problem"]["fact"]


def test_name_that_is_not_utf8_is_said(capsys: pytest.CaptureFixture[str]):
    Console(json=False).write_line("caf\udce9.txt")
    assert capsys.readouterr().out == "caf\\udce9.txt\n"


def test_display_keeps_its_own_colours_and_shows_those_of_a_message():
    file = io.StringIO()
    console = DisplayConsole(file=file, force_terminal=True, color_system="standard", width=200)
    with TrainingDisplay(make_plan(10), console, lambda: START) as display:
        display.show(started(START))
        display.show(Warned(at=START, message=HOSTILE))
    drawn = file.getvalue()
    assert f"\x1b[33mwarning: {SHOWN}\x1b[0m" in drawn and "\x1b[?25l" in drawn
    assert not unseen(OWN.sub("", drawn))


def test_tables_and_paint_show_the_control_characters_of_their_text():
    for line in (
        paint(HOSTILE, "good", on=True),
        *table_lines((HOSTILE,), [(HOSTILE,)], colours=True, tints=["red"]),
    ):
        assert SHOWN in line and "\x1b[" in line and not unseen(OWN.sub("", line))


def test_traceback_shows_the_control_characters_of_what_it_quotes(
    capsys: pytest.CaptureFixture[str],
):
    error = RuntimeError(HOSTILE)
    print_traceback(type(error), error, None)
    assert capsys.readouterr().err == f"RuntimeError: {SHOWN}\n"


def test_fault_of_a_thread_shows_the_control_characters_of_what_it_quotes():
    code = (
        "import farspan.__main__ as program, sys, threading\n"
        "sys.argv = ['farspan', '--version']\n"
        "try: program.main()\n"
        "except SystemExit: pass\n"
        "def fail(): raise RuntimeError(sys.stdin.read())\n"
        "thread = threading.Thread(target=fail)\n"
        "thread.start()\n"
        "thread.join()\n"
        "fail()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=HOSTILE, capture_output=True, text=True
    )
    assert f"RuntimeError: {SHOWN}" in done.stderr and done.stderr.count("Traceback") == 2
    assert not unseen(done.stderr)


def test_messages_of_libraries_show_their_control_characters():
    code = (
        "from farspan.domain.library_messages import escape_library_messages as escape\n"
        "import logging, warnings\n"
        f"escape(); logging.getLogger('pypdf').warning({HOSTILE!r}); warnings.warn({HOSTILE!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count(SHOWN) >= 2 and not unseen(done.stderr)


def prints(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that put text on standard output or standard error, or make a console that does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("print", "rich.console.Console", "rich.print") or re.search(
                r"(stdout|stderr)(\.buffer)?\.write(lines)?$", called
            ):
                yield node


def test_text_is_printed_through_the_filter_alone():
    raw = []
    for folder in ("farspan", "farspan_exports", "farspan_lab", "farspan_studies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            source = path.read_text()
            if name in PRINTERS | PIPES or not re.search(r"print\(|std(out|err)|Console\(", source):
                continue
            raw += [
                f"{name}:{call.lineno}: {ast.unparse(call)}"
                for call in prints(ast.parse(source))
                if not (call.args and ast.unparse(call.args[0]).startswith("escape_controls("))
            ]
    assert not raw
