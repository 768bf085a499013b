"""Estimates: the figures that follow from others."""

from __future__ import annotations

import msgspec
import pytest

from farspan.domain.cost import OVERHEAD_SHARE, Estimate
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load
from tests.report.fake_run import ESTIMATE


def test_figures_follow_from_the_step_and_the_workload():
    work = ESTIMATE.workload
    assert ESTIMATE.run_s == pytest.approx(work.steps * ESTIMATE.step_s / (1 - OVERHEAD_SHARE))
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


@pytest.mark.parametrize(
    "text", ['{"step_s": 1}', "[]", '{"step_s": 0, "run_s": 1, "memory": []}', "{"]
)
def test_malformed_estimate_file_is_refused(tmp_path, text):
    (path := tmp_path / "estimate.json").write_text(text)
    with pytest.raises(Refusal):
        load(path, Estimate)
