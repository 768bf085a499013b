"""Small runs of real workers whose checkpoints are copied."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from farspan.app.configs import as_yaml
from farspan.domain.config import CheckpointConfig, RunConfig
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, save
from farspan.launch.copied_run import copy_name, list_checkpoints
from farspan.launch.copies.folder import Folder
from farspan.launch.trust import seal_run
from tests import tiny
from tests.app.supervised import made
from tests.launch.test_launchers import TRAIN

#: Two workers, with a checkpoint as often as one can be written.
TWO = tiny.plan(
    replace(TRAIN, steps=120, validate_every=60, checkpoint_every_s=0.2, keep=2),
    rows=(4, 4),
    micro_rows=4,
)


def asked_for(place: Path | str | tuple[str, ...]) -> RunConfig:
    """The run.yaml of a run that is copied to a place."""
    copy = str(place) if isinstance(place, Path) else place
    return RunConfig(data="tests", checkpoint=CheckpointConfig(every="1s", keep=2, copy=copy))


def copied_run(path: Path, config: RunConfig, identity: str = "1d" * 8) -> RunFolder:
    """A run of two workers that a supervisor can train, made by this run.yaml."""
    run = made(path, TWO)
    run.config.write_bytes(as_yaml(config))
    save(replace(load(run.record, RunRecord), asked=config, id=identity), run.record)
    seal_run(run)
    return run


def copied_steps(place: Path, run: RunFolder) -> list[int]:
    """The steps of the whole checkpoints in the copy of a run in a folder, the newest first."""
    files = Folder(place).list_files(copy_name(run))
    return [each.step for each in list_checkpoints(files) if each.step >= 0]
