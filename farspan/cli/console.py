"""Where a command speaks: people read text on standard output; `--json` gives one object there and
nothing else.

Text from elsewhere (documents, names, what hosts answer) reaches a terminal through here alone: its
control characters are shown, not sent. `farspan.cli.display` does the same for live displays.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType

import msgspec

from farspan.cli.paint import fold_line, terminal_columns
from farspan.domain.escapes import escape_controls, escape_json_controls
from farspan.domain.problems import Problem


class Console:
    """Output of a command: `write_line` for people, `answer` for programs. With `--json` all text
    goes to standard error."""

    def __init__(self, json: bool) -> None:
        self.json = json

    def write_line(self, text: str = "", *, painted: bool = False) -> None:
        """Print text, its control characters as escapes. `painted`: `paint` and `table_lines` have
        coloured it."""
        stream = sys.stderr if self.json else sys.stdout
        print(escape_controls(text, keep_styles=painted), file=stream, flush=True)

    def write_facts(self, text: str) -> None:
        """Print lines of facts, folded to a terminal's width; where output is piped a line stays
        one."""
        stream = sys.stderr if self.json else sys.stdout
        for line in text.splitlines():
            self.write_line(fold_line(line, terminal_columns()) if stream.isatty() else line)

    def refuse(self, problem: Problem) -> None:
        """Print a refusal on standard error."""
        print(escape_controls(str(problem)), file=sys.stderr)

    def answer(self, value: object) -> None:
        """Print the command's result for programs; people have read it already."""
        if self.json:
            encoded = msgspec.json.encode(value).decode()
            print(escape_json_controls(encoded), flush=True)


def print_traceback(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Print Python's traceback of a fault of farspan's own, which may quote a document."""
    lines = traceback.format_exception(kind, error, trace)
    sys.stderr.write(escape_controls("".join(lines)))


def print_thread_traceback(about: threading.ExceptHookArgs) -> None:
    """Print the same of a thread; one that ends by SystemExit prints nothing, as Python has it."""
    if about.exc_type is not SystemExit:
        print_traceback(about.exc_type, about.exc_value, about.exc_traceback)
