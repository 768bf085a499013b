"""run.yaml as a value: written by hand or made here, overridden key by key, named, and compared
with what was run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from farspan.app.preflight_checks import unused_path
from farspan.domain.config import RunConfig, name_source
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import convert, load, load_yaml, parse_yaml

#: What a key meant where it is left out when farspan was older, and what it means now: a run that
#: was started then goes by its plan.
CHANGED_DEFAULTS = {"train.compile": (False, "auto")}
#: Read again at each start, as are where the index lies and what answers from it, and which lab is
#: entered.
READ_AGAIN = ("on_fault", "checkpoint.copy", "checkpoint.copy_rate", "train.trackers")


def make_config(data: str | os.PathLike[str] | RunConfig, **keys: Any) -> RunConfig:
    """Return the config of what to train (a folder or name of text, a run.yaml, or a config) with
    `keys` of run.yaml on top. A `budget` may be a time alone:
    `make_config("papers", budget="10m", size="tiny")`."""
    if isinstance(keys.get("budget"), str):
        keys["budget"] = {"time": keys["budget"]}
    if isinstance(data, RunConfig):
        config = data
    elif Path(data).suffix in (".yaml", ".yml"):
        config = load_yaml(Path(data), RunConfig)
    else:
        config = RunConfig(data=str(data))
    content = msgspec.to_builtins(config)
    for key, value in keys.items():
        own = content.get(key)
        if isinstance(own, dict) and isinstance(value, dict):
            content[key] = {**own, **value}
        else:
            content[key] = value
    return convert(content, RunConfig, "the arguments")


def override_config(config: RunConfig, override: str) -> RunConfig:
    """Return the config with `key.key=value` on top, checked like a line of the file."""
    keys, separator, value = override.partition("=")
    if not separator or not keys:
        raise Refusal(
            "usage",
            what=f"--set {override} is not KEY=VALUE",
            where="--set",
            fact="it needs a key, an equals sign and a value",
            remedy="write it like --set train.steps=100",
        )
    content: dict[str, Any] = msgspec.to_builtins(config)
    if keys.startswith("data."):
        content["data"] = msgspec.to_builtins(config.data_config)
    *folders, last = keys.split(".")
    inner = content
    for key in folders:
        if not isinstance(inner.get(key), dict):
            inner[key] = {}
        inner = inner[key]
    inner[last] = parse_yaml(value, f"--set {override}")
    return convert(content, RunConfig, f"--set {override}")


def default_name(config: RunConfig) -> str:
    """Return a run's folder name: `name`, or made from its source ("~/papers" -> "papers")."""
    if config.name:
        return config.name
    # Not "." and "..": "runs/.." would be the folder of run.yaml.
    return name_source(config.data_config.parts[0].source) or "run"


def as_yaml(config: RunConfig) -> bytes:
    """Return a config as a run.yaml that loads as the same config; defaults are left out."""
    import yaml

    values = msgspec.to_builtins(config)
    defaults = msgspec.to_builtins(RunConfig(data=config.data))
    for key, default in defaults.items():
        if key != "data" and values[key] == default:
            del values[key]
    return yaml.safe_dump(values, sort_keys=False).encode()


def refuse_edited(run: RunFolder) -> None:
    """Refuse a run whose run.yaml has another value than at its start, of a key that is not read
    again."""
    started = load(run.record, RunRecord).asked
    if started is None:
        return
    changed = describe_changes(started, load_yaml(run.config, RunConfig))
    if changed:
        raise Refusal(
            "plan-mismatch",
            what="this run's own run.yaml was changed, which does not change the run",
            where=run.config,
            fact="; ".join(changed),
            remedy=(
                "put it back, or start another run: "
                f"{command('train', run.config, '--run', f'{run.path}-2')}"
            ),
        )


def refuse_other(run: RunFolder, config: RunConfig, config_path: Path) -> None:
    """Refuse to resume a run that was made from another run.yaml than this one. Where and how it is
    parallelized may have been changed since (`farspan resume --cluster`)."""
    started = load(run.record, RunRecord).asked
    changed = []
    if started is not None:
        changed = describe_changes(replace(started, parallel=config.parallel), config)
    if changed:
        raise Refusal(
            "run-exists",
            what="the run in this folder was made from another run.yaml",
            where=run.path,
            fact="; ".join(changed),
            remedy=command("train", config_path, "--until-done", "--run", unused_path(run.path)),
        )


def describe_changes(started: RunConfig, now: RunConfig) -> list[str]:
    """Describe the keys of a run.yaml that differ from those that a run was made from, but for keys
    that are read again."""
    from farspan.app.clusters import is_external

    changed = []
    for key, before, after in _diff_values(_flatten_config(started), _flatten_config(now)):
        if key in READ_AGAIN or key.startswith(("index.", "serve.", "slurm.")):
            continue
        if key == "parallel.cluster" and is_external(str(after)):
            continue
        if CHANGED_DEFAULTS.get(key) == (before, after):
            continue
        was = _format_value(before)
        changed.append(f"{key} is {_format_value(after)}, was {was} at the start")
    return changed


def _flatten_config(config: RunConfig) -> dict[str, Any]:
    """Return the values of all keys of a run.yaml, however they are written there."""
    whole = replace(config, data=config.data_config, tokenizer=config.tokenizer_config)
    values: dict[str, Any] = msgspec.to_builtins(whole)
    return values


def _diff_values(
    before: dict[str, Any], after: dict[str, Any], folder: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name, old in before.items():
        key = f"{folder}{name}"
        new = after[name]
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _diff_values(old, new, f"{key}.")
        elif old != new:
            yield key, old, new


def _format_value(value: object) -> str:
    return "left out" if value is None else msgspec.json.encode(value).decode()
