"""The command line: `farspan COMMAND`. Each command is one file in `commands/`; its file name is
its name."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib
import os
import pkgutil
import signal
import sys
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

import msgspec

import farspan
from farspan._version import __version__
from farspan.app.extensions import find_extensions
from farspan.cli import commands
from farspan.cli.console import Console
from farspan.domain.escapes import shell_line
from farspan.domain.install import extra_of, install_command
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.suggest import any_of, known_names, suggest, suggest_key

#: The order in which `farspan --help` lists commands; those not named here follow by name.
ORDER = (
    "demo",
    "init",
    "prepare",
    "plan",
    "price",
    "fit",
    "rent",
    "train",
    "resume",
    "status",
    "logs",
    "stop",
    "report",
    "generate",
    "index",
    "embed",
    "tune",
    "search",
    "ask",
    "serve",
    "mcp",
    "export",
)


class Parser(argparse.ArgumentParser):
    """Takes `--json` at every level. Argument errors are refusals like all others."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object, nothing else, on standard output",
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but for an unknown option, which brings those that it may mean."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse_unknown(unknown, given)
        return given

    def _refuse_unknown(self, unknown: list[str], given: argparse.Namespace) -> NoReturn:
        words = f"unrecognized arguments: {' '.join(unknown)}"
        options = self.options_of(given)
        wrong = next((word for word in unknown if word.startswith("-")), None)
        if wrong is None:
            self.error(words)
        name, _, value = wrong.partition("=")
        if name.removeprefix("--") in own_names():  # such as `plan --fit`
            self.error(words, command(name.removeprefix("--"), "--help"))
        likely = suggest(name, options)
        if likely:
            self.error(words, any_of(likely, "use"))
        if "--set" in options:
            from farspan.domain.config import RunConfig
            from farspan.domain.struct_files import keys_of

            keys = suggest_key(name.lstrip("-"), keys_of(RunConfig))
            settings = [f"{key}={value or 'VALUE'}" for key in keys]
            if settings:
                self.error(words, any_of(settings, "use --set"))
        self.error(words)

    def options_of(self, given: argparse.Namespace) -> list[str]:
        """Return the options allowed where `given` was read, also those of the chosen action."""
        options = list[str]()
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                inner = action.choices.get(getattr(given, action.dest, ""))
                options += inner.options_of(given) if inner is not None else []
            elif action.help != argparse.SUPPRESS:
                options += action.option_strings
        return [option for option in options if option not in ("-h", "--help")]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, with the choices that a wrong one may mean."""
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        name = argparse._get_action_name(action) or ""
        option = action.option_strings[-1] if action.option_strings else self.prog
        likely = suggest(str(value), known)
        raise Refusal(
            "usage",
            what=f"argument {name}: invalid choice: {str(value)!r}",
            where=self.prog,
            fact=known_names(str(value), known, "choices"),
            remedy=any_of(likely, option) if likely else f"{shell_line(*self.prog.split())} --help",
        )

    def error(self, message: str, fix: str | None = None) -> NoReturn:
        raise Refusal(
            "usage",
            what=message,
            where=self.prog,
            fact=" ".join(self.format_usage().split()),
            remedy=fix or f"{shell_line(*self.prog.split())} --help",
        )


def own_names() -> list[str]:
    """Return the commands of this package, without importing any."""
    modules = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    return [name for name in modules if not name.startswith("_")]


def command_names() -> list[str]:
    """List every command, those of other packages too, without importing any."""
    known = {*own_names(), *find_extensions("commands")}
    ordered = [name for name in ORDER if name in known]
    return ordered + sorted(known.difference(ordered))


def load_command(name: str) -> ModuleType:
    """Return the module of a command; refuse a name that is none."""
    if name in own_names():
        return importlib.import_module(f"farspan.cli.commands.{name}")
    if (point := find_extensions("commands").get(name)) is None:
        meant = suggest(name, command_names())
        raise Refusal(
            "usage",
            what=f"there is no command {name!r}",
            where="farspan",
            fact=f"commands: {', '.join(command_names())}",
            remedy=" or ".join(command(likely, "--help") for likely in meant) or "farspan --help",
        )
    module: ModuleType = point.load()
    return module


def build_overview_parser() -> Parser:
    """Build farspan's own parser: it knows each command's help line, not its arguments."""
    parser = Parser(prog="farspan", description=farspan.__doc__)
    parser.add_argument("--version", action="version", version=f"farspan {__version__}")
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in command_names():
        parsers.add_parser(name, help=help_line(name))
    return parser


def help_line(name: str) -> str:
    """Read HELP of a command's file without importing it and all that it needs."""
    if name in own_names():
        module = f"farspan.cli.commands.{name}"
    else:
        module = find_extensions("commands")[name].value
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as source:
        line = next(line for line in source if line.startswith("HELP = "))
    return str(ast.literal_eval(line.removeprefix("HELP = ")))


def build_command_parser(name: str) -> Parser:
    module = load_command(name)
    parser = Parser(
        prog=f"farspan {name}",
        description=module.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    module.configure(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    options = takewhile(lambda word: word != "--", words)
    console = Console(json="--json" in options)
    given: argparse.Namespace | None = None
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        if not words or words[0].startswith("-"):
            parser = build_overview_parser()
            parser.parse_args(words or ["--help"])
            parser.error("the command comes before its options")
        else:
            given = build_command_parser(words[0]).parse_args(words[1:])
            # Most commands return nothing.
            return load_command(words[0]).run(given, console) or 0
    except BrokenPipeError:
        # Whoever read has gone: what Python still holds back for them must not fail at exit.
        _discard_output(sys.stdout)
    except (Exception, KeyboardInterrupt) as error:
        problem = as_refusal(error, words).problem
        if given is not None and problem.key is not None:
            from farspan.cli.arguments import at_option

            problem = at_option(problem, given)
        _print_problem(problem, console)
        return problem.exit_code
    return 0


def _print_problem(problem: Problem, console: Console) -> None:
    """Print what ends a command, as far as it can be written: a full disk takes no message."""
    fields = msgspec.to_builtins(problem)
    for key, value in fields.items():
        if isinstance(value, str):  # As UTF-8 can have it: names of files are bytes.
            fields[key] = value.encode(errors="backslashreplace").decode()
    shown = (
        (sys.stderr, partial(console.refuse, problem)),
        (sys.stdout, partial(console.answer, {"problem": fields})),
    )
    for stream, show in shown:
        try:
            show()
            stream.flush()
        except OSError:
            _discard_output(stream)


def _discard_output(stream: TextIO) -> None:
    """Lead a stream nowhere, with all that Python still holds back for it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def as_refusal(error: BaseException, words: list[str]) -> Refusal:
    """Return the problem that an error means to the user. Raise a fault of farspan again
    itself."""
    name = " ".join(["farspan", *words[:1]])
    match error:
        case Refusal():
            return error
        case KeyboardInterrupt():
            return Refusal(
                "interrupted",
                what="stopped as asked",
                where=name,
                fact="what was finished so far is kept and used again",
                remedy=command(*words),
            )
        case ModuleNotFoundError(name=str(module)) if not module.startswith("farspan"):
            return Refusal(
                "extra-missing",
                what="a library is missing that this needs",
                where=name,
                fact=f"{module} is not installed for {sys.executable}",
                remedy=install_command(extra_of(module)),
            )
        case RuntimeError() if "home directory" in str(error):  # As pathlib has it.
            return Refusal(
                "path-missing",
                what="there is no such home folder",
                where=name,
                fact=(
                    "a path that begins with ~NAME lies in the home folder of a user, and none "
                    "has this name"
                ),
                remedy="write ~/ for your own home folder, or the whole path",
            )
        case OSError():
            code = "path-unusable"
            where = error.filename or name
            what = "the system refuses this path"
            remedy = shell_line("ls", "-ld", Path(str(where)))
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                code = "disk-full"
                what = "a file could not be written"
                remedy = "free some space: df -h"
            elif isinstance(error, IsADirectoryError):
                what = "this is a folder where a file is needed"
                folder = Path(str(error.filename or "."))
                remedy = f"name a file in it: {shell_line('ls', folder)}"
            fact = error.strerror or str(error)
            return Refusal(code, what=what, where=where, fact=fact, remedy=remedy)
    raise error
