"""Figures of `sacct`, from what Slurm 22.05 with slurmdbd printed for a job that was requeued."""

from __future__ import annotations

import pytest

from farspan.launch.slurm_accounting import parse_accounting, parse_cpu_time, read_accounting
from tests.slurm.daemons import Slurm

PRINTED = """\
1|3|00:00.801||
1.batch|3|00:00.002|10637312|0
1.0|3|00:00.798|467623936|0
1|10|00:01.482||0
1.batch|10|00:00.024|10801152|0
1.0|10|00:01.458|584278016|0
"""


def test_starts_of_a_requeued_job_are_summed_up_without_its_steps():
    used = parse_accounting(PRINTED)
    assert used is not None
    assert (used.jobs, used.starts, used.elapsed_s) == (1, 2, 13.0)
    assert used.cpu_s == pytest.approx(2.283)
    assert used.memory_bytes == 584278016
    assert used.energy_j is None
    assert str(used).startswith("1 Slurm job in 2 starts: 13 s elapsed")


def test_nothing_of_a_job_is_no_accounting():
    assert parse_accounting("") is None
    assert read_accounting([]) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:01.500", 1.5), ("01:02:03", 3723.0), ("2-00:00:01", 172801.0)]
)
def test_cpu_times_have_days_and_fractions(text: str, seconds: float):
    assert parse_cpu_time(text) == seconds


@pytest.mark.slow
def test_slurm_without_accounts_gives_no_figures(in_slurm: Slurm):
    assert read_accounting(["1"]) is None
