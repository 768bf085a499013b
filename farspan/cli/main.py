"""The command line: `farspan COMMAND`. Each command is one file in `commands/`; its file name is its name."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import pkgutil
import shlex
import signal
import sys
from types import ModuleType
from typing import NoReturn

import farspan
from farspan.cli import commands
from farspan.cli.console import Console
from farspan.domain.problems import Refusal, nearest

#: The order in which `farspan --help` lists commands; those not named here follow by name.
ORDER = ("demo", "init", "prepare", "plan", "train", "resume", "report", "generate", "embed", "search", "export")


class Parser(argparse.ArgumentParser):
    """Argument errors are refusals like all others: one message, the nearest word, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(
            "usage", what=message, where=self.prog, fact=" ".join(self.format_usage().split()),
            remedy=f"{self.prog} --help",
        )  # fmt: skip


def names() -> list[str]:
    """Every command, without importing any."""
    found = [module.name for module in pkgutil.iter_modules(commands.__path__) if not module.name.startswith("_")]
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"farspan.cli.commands.{name}")


def overview() -> Parser:
    """The parser of `farspan` itself: it knows each command's help line, not its arguments."""
    parser = Parser(prog="farspan", description=farspan.__doc__, add_help=True)
    parser.add_argument("--version", action="version", version=f"farspan {farspan.__version__}")
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in names():
        parsers.add_parser(name, help=load(name).HELP, add_help=False)
    return parser


def parser_of(name: str) -> Parser:
    command = load(name)
    parser = Parser(prog=f"farspan {name}", description=command.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    command.configure(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    console = Console(json="--json" in words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not words or words[0].startswith("-"):
            overview().parse_args(words or ["--help"])
            return 0
        if words[0] not in names():
            raise unknown(words[0])
        given = parser_of(words[0]).parse_args(words[1:])
        load(words[0]).run(given, console)
        return 0
    except Refusal as refusal:
        return refused(refusal, console)
    except KeyboardInterrupt:
        return refused(interrupted(words), console)
    except BrokenPipeError:
        # Whoever read has gone: what Python still holds back for them must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return refused(unusable(error, f"farspan {words[0]}"), console)


def refused(refusal: Refusal, console: Console) -> int:
    print(refusal.problem, file=sys.stderr)
    console.answer({"problem": refusal.problem})
    return refusal.problem.exit_code


def interrupted(words: list[str]) -> Refusal:
    return Refusal(
        "interrupted", what="stopped as asked", where=f"farspan {words[0]}",
        fact="what was finished so far is kept and used again", remedy=shlex.join(["farspan", *words]),
    )  # fmt: skip


def unusable(error: OSError, command: str) -> Refusal:
    """What the system says of a path that cannot be read or written."""
    where, fact = error.filename or command, error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(
            "disk-full", what="a file could not be written", where=where, fact=fact, remedy="free some space: df -h"
        )
    return Refusal(
        "path-unusable", what="the system refuses this path", where=where, fact=fact,
        remedy=f"ls -ld {shlex.quote(str(where))}",
    )  # fmt: skip


def unknown(word: str) -> Refusal:
    match = nearest(word, names())
    return Refusal(
        "usage", what=f"there is no command {word!r}", where="farspan", fact=f"commands: {', '.join(names())}",
        remedy=f"farspan {match} --help" if match else "farspan --help",
    )  # fmt: skip
