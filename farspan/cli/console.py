"""Where a command speaks: people read text on standard output; `--json` gives one object there and
nothing else."""

from __future__ import annotations

import sys

import msgspec


class Console:
    """`say` for people, `answer` for programs. With `--json` all that is said goes to standard
    error."""

    def __init__(self, json: bool) -> None:
        self.json = json

    def say(self, text: str = "") -> None:
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def answer(self, value: object) -> None:
        """The command's result, for programs; people have been told already."""
        if self.json:
            sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
            sys.stdout.flush()
