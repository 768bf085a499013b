"""The command line: `farspan COMMAND`. Each command is one file in `commands/`; its file name is its name."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from types import ModuleType
from typing import NoReturn

import farspan
from farspan.cli import commands
from farspan.cli.console import Console
from farspan.domain.problems import EXIT_CODES, Refusal, nearest

#: The order in which `farspan --help` lists commands; those not named here follow by name.
ORDER = ("demo", "init", "prepare", "plan", "train", "resume", "report", "generate", "embed", "search", "export")


class Parser(argparse.ArgumentParser):
    """Argument errors are refusals like all others: one message, the nearest word, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(
            "usage", what=message, where=self.prog, fact="the command does not take these words",
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
        print(refusal.problem, file=sys.stderr)
        console.answer({"problem": refusal.problem})
        return refusal.problem.exit_code
    except KeyboardInterrupt:
        print("interrupted; what was prepared so far is kept and reused", file=sys.stderr)
        return EXIT_CODES["interrupted"]
    except BrokenPipeError:
        return 0


def unknown(word: str) -> Refusal:
    match = nearest(word, names())
    return Refusal(
        "usage", what=f"there is no command {word!r}", where="farspan", fact=f"commands: {', '.join(names())}",
        remedy=f"farspan {match} --help" if match else "farspan --help",
    )  # fmt: skip
