"""What a training raises and goes on past where its report or its trackers' files cannot be
written."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from farspan.app import training
from farspan.app.updates import Note
from farspan.domain.problems import Refusal
from tests import tiny
from tests.app.supervised import made
from tests.launch.test_launchers import TRAIN


def test_cause_of_a_failed_run_is_raised_though_its_report_cannot_be_written(tmp_path):
    """Here one of a token that the model has no row for."""
    run = made(tmp_path / "run", tiny.plan(TRAIN))
    np.full(3000, 60_000, "<u2").tofile(tmp_path / "corpus" / "train.bin")
    (run.report / "in the way").mkdir(parents=True)
    with pytest.raises(Refusal, match="index out of range"):
        training.train_run(run)


@pytest.mark.slow
def test_run_goes_on_where_nothing_can_be_written_for_tensorboard(tmp_path):
    run = made(tmp_path / "run", tiny.plan(replace(TRAIN, steps=6)))
    notes = list[str]()
    run.tensorboard.write_text("in the way")
    report = training.train_run(
        run, lambda update: notes.append(update.text) if isinstance(update, Note) else None
    )
    assert report.run.history.reason == "done"
    assert [note for note in notes if "the tracker tensorboard" in note] == notes
    assert "lacks the end of this run" in notes[-1] and len(notes) <= 2
