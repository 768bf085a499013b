"""Estimates: the figures that follow from others, and how an earlier version wrote them down."""

from __future__ import annotations

import json

import msgspec
import pytest

from farspan.domain.problems import Refusal
from farspan.domain.results import RESERVE, load_estimate, read_events
from tests.report.fake_run import ESTIMATE, started

#: What an earlier version wrote for ESTIMATE: figures beside each other, no workload.
OLD = {key: value for key, value in ESTIMATE.as_json().items() if key != "workload"}


def test_figures_follow_from_the_step_and_the_workload():
    work = ESTIMATE.workload
    assert ESTIMATE.run_s == pytest.approx(work.steps * ESTIMATE.step_s / (1 - RESERVE))
    cut = msgspec.structs.replace(
        ESTIMATE,
        workload=msgspec.structs.replace(
            work, deadline_s=ESTIMATE.run_s / 4, egress_usd_per_step=0.01
        ),
    )
    assert cut.steps_done == pytest.approx(work.steps / 4)
    assert cut.usd == pytest.approx(ESTIMATE.usd / 4 + 0.01 * work.steps / 4)
    assert cut.kwh == pytest.approx(ESTIMATE.kwh / 4)
    unknown = msgspec.structs.replace(work, usd_per_hour=None, watts=None, peak_flops=None)
    free = msgspec.structs.replace(ESTIMATE, workload=unknown)
    assert (free.usd, free.kwh, free.mfu) == (None, None, None)


@pytest.mark.parametrize("unknown", [(), ("usd", "kwh", "mfu")])
def test_estimate_of_an_earlier_version_reads_back_with_the_same_values(tmp_path, unknown):
    old = OLD | dict.fromkeys(unknown)
    (path := tmp_path / "estimate.json").write_text(json.dumps(old))
    event = msgspec.to_builtins(started(0.0)) | {"estimate": old}
    (events := tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    for read in (load_estimate(path), next(read_events(events)).estimate):
        said = read.as_json()
        for key, value in old.items():
            assert said[key] == (
                pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            ), key


@pytest.mark.parametrize(
    "text", ['{"step_s": 1}', "[]", '{"step_s": 0, "run_s": 1, "memory": []}', "{"]
)
def test_malformed_estimate_file_is_refused(tmp_path, text):
    (path := tmp_path / "estimate.json").write_text(text)
    with pytest.raises(Refusal):
        load_estimate(path)
