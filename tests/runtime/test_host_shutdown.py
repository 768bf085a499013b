"""Whether the host of a worker that got a signal is being taken away."""

from __future__ import annotations

import pytest

from farspan.runtime.host_shutdown import JOB_VARIABLES, is_host_leaving


@pytest.fixture(autouse=True)
def plain_host(monkeypatch, tmp_path):
    """A process of no job, and of a system without systemd."""
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}")


@pytest.mark.parametrize("name", JOB_VARIABLES)
def test_the_host_of_a_job_or_pod_leaves(name, monkeypatch):
    assert not is_host_leaving()
    monkeypatch.setenv(name, "7")
    assert is_host_leaving()


@pytest.mark.parametrize(
    ("state", "leaves"), [("stopping", True), ("running", False), ("degraded", False), ("", False)]
)
def test_a_host_leaves_while_systemd_stops_it(state, leaves, tmp_path):
    """systemctl ends with 1 in every state but `running`."""
    client = tmp_path / "systemctl"
    client.write_text(f"#!/bin/sh\necho {state}\n[ {state or 'none'} = running ]\n")
    client.chmod(0o755)
    assert is_host_leaving() == leaves
