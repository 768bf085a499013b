"""The worker processes that all tests of plans share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.runtime.fleet import Fleet


@pytest.fixture(scope="package")
def fleet() -> Iterator[Fleet]:
    with Fleet() as made:
        yield made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine two threads spend tiny steps waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where run folders and the corpus that they share lie."""
    return tmp_path_factory.mktemp("plans")
