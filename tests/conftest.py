"""Tests marked `timed` say something of times that were measured, which is true of a machine that nobody disturbs.

They get three tries. Where the last fails, too, while the host of a virtual machine gave its cores to others, the test
is skipped and says so.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

TRIES = 3
#: Share of the cores' time that a host may take before a failed time says nothing.
TAKEN = 0.1


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timed: its verdict is a time; it gets three tries")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1, only_rerun=["AssertionError"]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    before = _ticks()
    try:
        return (yield)
    except AssertionError:
        taken, of = (after - was for after, was in zip(_ticks(), before, strict=True))
        last = getattr(item, "execution_count", 1) == TRIES
        if item.get_closest_marker("timed") and last and taken > TAKEN * of:
            pytest.skip(f"waits for a host that leaves this machine its cores: it took {taken / of:.0%} of their time")
        raise


def _ticks() -> tuple[int, int]:
    """Hundredths of a second, of all cores, that the host took, and of all; proc(5), /proc/stat."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return int(words[7]), sum(int(word) for word in words)
