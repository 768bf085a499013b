"""A run goes on as it was planned: what was changed in its own run.yaml since is said, as nothing would come of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from farspan.domain.codec import load, load_yaml
from farspan.domain.config import RunConfig
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord


def refuse_edited(run: RunFolder) -> None:
    """Refuse a run whose run.yaml has another value than at its start, of a key that is not read again."""
    started, now = load(run.record, RunRecord).asked, load_yaml(run.config, RunConfig)
    if started is None:
        return
    changed = [
        f"{key} is {_shown(after)}, was {_shown(before)} at the start"
        for key, before, after in _differences(_values(started), _values(now))
        if not read_again(key, after)
    ]
    if changed:
        raise Refusal(
            "plan-mismatch", what="this run's own run.yaml was changed, which does not change the run",
            where=run.config, fact="; ".join(changed),
            remedy=f"put it back, or start another run: {command('train', run.config, '--run', f'{run.path}-2')}",
        )  # fmt: skip


def read_again(key: str, value: object) -> bool:
    """Whether a key of a run's own run.yaml counts after its start: where the index lies, and which lab is entered."""
    return key.startswith("index.") or (key == "parallel.cluster" and str(value).startswith("lab:"))


def _values(config: RunConfig) -> dict[str, Any]:
    """All keys of a run.yaml, however they are written there."""
    whole = msgspec.structs.replace(config, data=config.data_config, tokenizer=config.tokenizer_config)
    found: dict[str, Any] = msgspec.to_builtins(whole)
    return found


def _differences(before: dict[str, Any], after: dict[str, Any], folder: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, old in before.items():
        key, new = f"{folder}{name}", after[name]
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{key}.")
        elif old != new:
            yield key, old, new


def _shown(value: object) -> str:
    return "left out" if value is None else msgspec.json.encode(value).decode()
