"""Weights & Biases. Its own variables choose the server, the project and the account.

Without a key, or where its server does not answer, the run is written to files in the run's folder,
and `wandb sync` sends them. No text, code, path, name of a host or list of packages is sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.domain.escapes import one_line, shell_line
from farspan.domain.own_files import refuse_link
from farspan.domain.run import RunFolder
from farspan.report.trackers import EndState, Point, TrackedRun

DEFAULT_PROJECT = "farspan"
#: The server gets this long to answer before the run is written offline.
INIT_TIMEOUT_S = 30
#: Characters of its error that are shown.
MAX_ERROR = 200


class WandbRun:
    """A run in Weights & Biases, online or in files."""

    def __init__(self, run: Any, reason: str) -> None:
        self._run = run
        self.note = ""
        if run.offline:
            send = shell_line(sys.executable, "-m", "wandb", "sync", run.settings.sync_dir)
            self.note = f"wandb writes to files ({reason}); to send them afterwards: {send}"

    def last_steps(self) -> dict[str, int] | None:
        if self._run.offline:
            return None
        last = self._run.starting_step - 1
        return {"train": last, "val": last}

    def rewind(self, step: int) -> bool:
        return False

    def describe(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, points: Sequence[Point]) -> None:
        """Log the values; text that the model wrote stays here."""
        for point in points:
            if point.values:
                self._run.log(point.values, step=point.step)

    def finish(self, state: EndState, summary: Mapping[str, Any], at: float) -> None:
        self._run.summary.update({"state": state, **summary})
        self._run.finish(exit_code=int(state == "failed"))


def required_modules() -> tuple[str, ...]:
    return ("wandb",)


def open_tracker(run: TrackedRun) -> WandbRun:
    import wandb

    folder = RunFolder(run.folder).trackers
    refuse_link(folder / "wandb")
    # Without the folder the library would take one for temporary files.
    folder.mkdir(exist_ok=True)
    reason = "as WANDB_MODE asks"
    if wandb.run is not None:  # It has failed, and is begun again.
        wandb.teardown()
    try:
        opened = _begin_run(run, folder, None)
    except wandb.errors.Error as error:
        reason = one_line(str(error))[:MAX_ERROR]
        # The library's service still has the run that it could not begin.
        wandb.teardown()
        opened = _begin_run(run, folder, "offline")
    return WandbRun(opened, reason)


def _begin_run(run: TrackedRun, folder: Path, mode: Any) -> Any:
    """Begin or resume the run; a mode of None is that of WANDB_MODE, or online."""
    import wandb

    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        init_timeout=INIT_TIMEOUT_S,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
        name=os.environ.get("WANDB_NAME", run.name),
        id=run.id,
        resume="allow",
        dir=str(folder),
        config=run.config,
        mode=mode,
        settings=settings,
    )
