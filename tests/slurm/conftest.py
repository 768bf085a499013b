"""A real Slurm of two nodes on this machine, for all tests of this folder that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm import daemons


@pytest.fixture(scope="session")
def slurm() -> Iterator[daemons.Slurm]:
    if reason := daemons.missing():
        pytest.skip(f"a real Slurm {reason}")
    with daemons.running(nodes=2) as started:
        yield started


@pytest.fixture
def in_slurm(slurm: daemons.Slurm, monkeypatch: pytest.MonkeyPatch) -> daemons.Slurm:
    """The Slurm whose clients this process runs."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    return slurm
