"""Tests marked `timed` say something of times that were measured, which is true of a machine that
nobody disturbs.

They get three tries. Where one fails while the host of a virtual machine gave its cores to others,
the test is skipped and says so.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

TRIES = 3
#: Share of the cores' time that a host may take before a failed time says nothing.
TAKEN = 0.1

hypothesis.settings.register_profile("farspan", deadline=None)
hypothesis.settings.load_profile("farspan")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"timed: its verdict is a time; it gets {TRIES} tries")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    if item.get_closest_marker("timed") is None:
        return (yield)
    before = ticks()
    try:
        return (yield)
    except (Exception, pytest.fail.Exception):
        taken, of = (after - was for after, was in zip(ticks(), before, strict=True))
        if taken > TAKEN * of:
            pytest.skip(
                f"waits for a host that leaves this machine its cores: it took {taken / of:.0%} of "
                "their time"
            )
        raise


def ticks() -> tuple[int, int]:
    """Hundredths of a second, of all cores: what the host took, and all; proc(5), /proc/stat."""
    stat = Path("/proc/stat")
    words = (
        [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
        if stat.exists()
        else [0] * 8
    )
    return words[7], sum(words)
