"""Arguments that several commands take, and what they name: run.yaml with its overrides, a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farspan.app.configs import override_config
from farspan.cli.console import Console
from farspan.domain.config import RunConfig
from farspan.domain.escapes import shell_word, yaml_word
from farspan.domain.index_folder import INDEXES, IndexFolder
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.run import RunFolder, first_run_command
from farspan.domain.struct_files import load_yaml

#: The plans of all runs in a folder of runs.
PLANS = "*/plan.json"
#: Options that are short for a key of run.yaml.
SHORT_KEYS = {
    "cluster": "parallel.cluster",
    "launcher": "parallel.launcher",
    "from": "model.path",
}


def takes_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load_config` reads."""
    parser.add_argument(
        "config",
        metavar="RUN.YAML",
        nargs="?",
        default="run.yaml",
        type=Path,
        help="what to train (default: run.yaml)",
    )
    for name in ("cluster", "launcher"):
        value = name.upper()
        parser.add_argument(
            f"--{name}", metavar=value, help=f"short for --set parallel.{name}={value}"
        )
    parser.add_argument(
        "--from",
        metavar="MODEL",
        help="continue this model: a folder as transformers saves it, or an id of the hub (short "
        "for --set model.path=MODEL)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of run.yaml"
    )


def load_config(given: argparse.Namespace) -> RunConfig:
    """Read run.yaml with `--set key.key=value` on top; each override is checked like a line of the
    file."""
    path: Path = given.config
    is_default = path.name == "run.yaml" and path.absolute().parent.is_dir()
    if is_default and not path.exists():
        raise Refusal(
            "path-missing",
            what="there is no run.yaml here",
            where=path.absolute(),
            fact="it says what to train",
            remedy=command("init", "FOLDER", "--out", path),
        )
    _refuse_text(path)
    config = load_yaml(path, RunConfig)
    short = [
        f"{SHORT_KEYS[name]}={yaml_word(value)}" for name, value in _given_short_keys(given).items()
    ]
    for override in (*short, *given.set):
        config = override_config(config, override)
    return config


def _given_short_keys(given: argparse.Namespace) -> dict[str, str]:
    values = {key: getattr(given, key) for key in SHORT_KEYS}
    return {key: value for key, value in values.items() if value}


def _refuse_text(path: Path) -> None:
    """Refuse what `farspan init` takes where run.yaml is meant: a folder, or a source's name."""
    from farspan.corpus.sources import list_sources

    if path.is_dir():
        own = path / "run.yaml"
        if (path / "plan.json").is_file():
            what = "this is a run, not a run.yaml"
            fix = RunFolder(path).resume_command()
        elif own.is_file():
            what = "this is a folder, not its run.yaml"
            fix = f"use {shell_word(own)}"
        else:
            what = "this is a folder, not a run.yaml"
            fix = _init_command(path)
        raise Refusal(
            "path-unusable", what=what, where=path, fact="Is a directory, not a file", remedy=fix
        )
    name = str(path)
    is_source = name in list_sources() or name.startswith("hf:")
    if is_source and not path.exists():
        raise Refusal(
            "path-missing",
            what="this is a source of text, not a run.yaml",
            where=name,
            fact="a run.yaml says what to train on it",
            remedy=_init_command(name),
        )


def _init_command(source: object) -> str:
    """Return the command that writes a run.yaml for a source and keeps one that is there."""
    if not Path("run.yaml").exists():
        return command("init", source)
    path = str(source).removeprefix("hf:").partition(":")[0]
    name = Path(path).resolve().name or "text"
    return command("init", source, "--out", f"{name}.yaml")


def at_option(problem: Problem, given: argparse.Namespace) -> Problem:
    """Move a problem with a key of run.yaml to the option that set it, or else to the file that was
    given."""
    if problem.key is None or not hasattr(given, "config"):
        return problem
    options: dict[str, str] = {}
    for name, value in _given_short_keys(given).items():
        options[SHORT_KEYS[name]] = f"--{name} {value}"
    for override in given.set:
        name = override.partition("=")[0]
        options[name] = f"--set {override}"

    # The last option that sets the key or what holds it, else all that set a part of it.
    key = f"{problem.key}."
    whole: list[str] = []
    parts: list[str] = []
    for name, option in options.items():
        if key.startswith(f"{name}."):
            whole = [option]
        elif name.startswith(key):
            parts.append(option)
    where = " ".join(whole or parts)
    return msgspec.structs.replace(problem, where=where or f"{given.config}, key {problem.key}")


def words_again(
    given: argparse.Namespace, *, absolute: bool = False, leave_out: str = ""
) -> list[object]:
    """Return the arguments that `load_config` read, for a further command on the same run; with
    `absolute`, from anywhere. Short options of the value `leave_out` are left out."""
    words: list[object] = [given.config.absolute() if absolute else given.config]
    for key, value in _given_short_keys(given).items():
        words += [f"--{key}", value] if value != leave_out else []
    for override in given.set:
        words += ["--set", override]
    return words


def takes_without(parser: argparse.ArgumentParser) -> None:
    """Add the argument that gives sites of a run's cluster up."""
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="SITE",
        help="go on without this site, also with half of the hosts or fewer",
    )


def takes_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `find_run` reads: RUN, the same in every command."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="run directory (default: the newest under runs/)"
    )
    # As `generate` and `search` alone had it before.
    parser.add_argument("--run", dest="run_option", help=argparse.SUPPRESS)


def find_run(given: argparse.Namespace, console: Console) -> RunFolder:
    """Return the run that was named, or print and return the newest under `runs/`."""
    named = given.run if given.run_option is None else given.run_option
    if given.run not in (None, named):
        raise Refusal(
            "usage",
            what="two runs are named, and one is taken",
            where=f"{given.run} {named}",
            fact="RUN and --run are the same",
            remedy="leave --run out",
        )
    if named is not None:
        return RunFolder.existing(Path(named))
    run = RunFolder(_started_plans()[-1].parent)
    console.write_line(f"run: {run.path}")
    return run


def find_home(given: argparse.Namespace, console: Console) -> RunFolder | IndexFolder:
    """Return the run or the index folder that was named, or print and return the one whose index is
    the newest under `runs/` and `indexes/`; the newest run where there is no index."""
    from farspan.app.index_folders import open_home

    named = given.run if given.run_option is None else given.run_option
    if named is None:
        places = [Path("runs"), INDEXES]
        manifests = list[Path]()
        for place in places:
            manifests += place.glob("*/index/index.json")
        can_train = Path("run.yaml").exists() or any(Path("runs").glob(PLANS))
        if not manifests and not can_train:
            raise Refusal(
                "not-a-run",
                what="there is no index here, and no run",
                where=Path().absolute(),
                fact="neither runs nor indexes holds one",
                remedy=command("index", "FOLDER"),
            )
        if not manifests:
            return find_run(given, console)
        newest = max(manifests, key=lambda path: path.stat().st_mtime)
        home = open_home(newest.parents[1])
        console.write_line(f"index: {home.path}")
        return home
    if given.run in (None, named) and IndexFolder(Path(named)).config.is_file():
        return IndexFolder(Path(named))
    return find_run(given, console)


def compute_on_one_thread() -> None:
    """Keep NumPy to one thread, if it is not imported yet: one query's products are small, and to
    start threads took .3 s of a search."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def refuse_run_as_text(given: argparse.Namespace, name: str, text: str | None) -> None:
    """Refuse a run in the place of a command's text, which stands before it."""
    if not text or not _is_run(text):
        return
    has_text = given.run is not None and not _is_run(given.run)
    raise Refusal(
        "usage",
        what=f"this is a run, and {name} begins with a text",
        where=text,
        fact=f"the order is: farspan {name} TEXT RUN",
        remedy=command(name, given.run if has_text else "TEXT", text),
    )


def _is_run(text: str) -> bool:
    """Return True for the name of a run or an index. What can be no path, such as a long prompt, is
    none."""
    try:
        is_index = IndexFolder(Path(text)).config.is_file()
        return is_index or RunFolder(Path(text)).plan.is_file()
    except (OSError, ValueError):
        return False


def find_runs(named: Sequence[str]) -> list[RunFolder]:
    """Return the runs that were named, or all under `runs/`, the newest first."""
    if named:
        return [RunFolder.existing(Path(run)) for run in named]
    return [RunFolder(plan.parent) for plan in reversed(_started_plans())]


def _started_plans() -> list[Path]:
    """Return the plans of all runs under `runs/`, the newest last."""
    started = sorted(Path("runs").glob(PLANS), key=lambda path: path.stat().st_mtime)
    if not started:
        raise Refusal(
            "not-a-run",
            what="there is no run here",
            where=Path("runs").absolute(),
            fact="no folder in it has a plan.json",
            remedy=first_run_command(),
        )
    return started


def parse_positive(text: str) -> int:
    """Parse an argument that counts."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def parse_port(text: str) -> int:
    """Parse the number of a port; 0 is any. Raises ArgumentTypeError."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 65535")
    return number


def check_store(given: argparse.Namespace) -> None:
    """Refuse a `--store` that is none, before anything is read."""
    if given.store is not None:
        from farspan.retrieval.stores import resolve

        resolve(given.store, "--store")


def takes_encoder(parser: argparse.ArgumentParser) -> None:
    """Add the ready encoder of an index."""
    parser.add_argument(
        "--encoder",
        metavar="auto|own|minilm|FOLDER",
        help=(
            "a ready encoder beside words: one on this machine that reads the language\n(auto), "
            "none (own), a known one, fetched if need be (minilm), or a folder"
        ),
    )


def takes_embedding(parser: argparse.ArgumentParser) -> None:
    """Add where vectors go, and what makes them."""
    parser.add_argument(
        "--store",
        metavar="NAME[:LOCATION]",
        help="where vectors go (default: index.store of the run's run.yaml)",
    )
    takes_encoder(parser)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="what embeds (default: the fastest)",
    )
    parser.add_argument(
        "--processes",
        type=parse_positive,
        default=1,
        help="processes that embed on a CPU (default: 1)",
    )
