"""Finding what commands work on: run.yaml with its overrides, the newest run, the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from farspan.cli.console import Console
from farspan.domain.codec import convert, load_yaml, missing_path, parse_yaml
from farspan.domain.config import RunConfig
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder


def cache() -> Path:
    """Prepared corpora live here: $FARSPAN_CACHE, or farspan's folder in the user's cache."""
    if given := os.environ.get("FARSPAN_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "farspan"


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """run.yaml with `--set key.key=value` on top; each override is checked like a line of the file."""
    if path.name == "run.yaml" and not path.exists() and path.absolute().parent.is_dir():
        raise Refusal(
            "path-missing", what="there is no run.yaml here", where=path.absolute(), fact="it says what to train",
            remedy=f"farspan init FOLDER --out {path}",
        )  # fmt: skip
    if not path.exists():
        raise missing_path(path)
    if not overrides:
        return load_yaml(path, RunConfig)
    load_yaml(path, RunConfig)
    content: dict[str, Any] = parse_yaml(path.read_text(), path) or {}
    for override in overrides:
        _set(content, override)
    return convert(content, RunConfig, f"{path} with --set")


def _set(content: dict[str, Any], override: str) -> None:
    keys, separator, value = override.partition("=")
    if not separator or not keys:
        raise Refusal(
            "usage", what=f"--set {override} is not KEY=VALUE", where="--set", fact="a key, an equals sign, a value",
            remedy="write it like --set train.steps=100",
        )  # fmt: skip
    *folders, last = keys.split(".")
    for key in folders:
        inner = content.get(key)
        if key == "data" and isinstance(inner, str):
            inner = {"source": inner}
        content[key] = inner = dict(inner) if isinstance(inner, dict) else {}
        content = inner
    content[last] = parse_yaml(value, f"--set {override}")


def find_run(given: str | None, console: Console) -> RunFolder:
    """The run that was named, or the newest under `runs/`, said aloud."""
    if given is not None:
        return RunFolder.existing(Path(given))
    started = sorted(Path("runs").glob("*/plan.json"), key=lambda path: path.stat().st_mtime)
    if not started:
        raise Refusal(
            "not-a-run", what="there is no run here", where=Path("runs").absolute(), fact="no runs/*/plan.json",
            remedy="farspan train run.yaml",
        )  # fmt: skip
    run = RunFolder(started[-1].parent)
    console.say(f"run: {run.path}")
    return run


def default_name(config: RunConfig) -> str:
    """A run's folder name: `name`, or made from its source ("~/papers" -> "papers")."""
    if config.name:
        return config.name
    source = config.data_config.source
    stem = Path(source.removeprefix("hf:").split(":")[0]).expanduser().stem
    return stem or "run"


def as_yaml(config: RunConfig) -> bytes:
    """A config as a run.yaml that loads as the same config; defaults left out."""
    import yaml

    value = msgspec.to_builtins(config)
    default = msgspec.to_builtins(RunConfig(data=config.data))
    kept = {key: part for key, part in value.items() if key == "data" or part != default[key]}
    return yaml.safe_dump(kept, sort_keys=False).encode()
