"""Batches that are computed by one thread each."""

from __future__ import annotations

import threading

import pytest
import torch

from farspan.retrieval.cpu_threads import compute_on_threads
from farspan.retrieval.embed import _BATCH_TOKENS, _batches


def test_results_come_in_order_and_each_thread_computes_alone():
    before = torch.get_num_threads()
    names: set[str] = set()

    def compute(number: int) -> tuple[int, int]:
        names.add(threading.current_thread().name)
        return number, torch.get_num_threads()

    found = list(compute_on_threads(compute, range(50)))
    assert found == [(number, 1) for number in range(50)]
    assert threading.current_thread().name not in names
    assert torch.get_num_threads() == before


def test_a_batch_that_fails_ends_the_rest_and_gives_the_threads_back():
    before = torch.get_num_threads()
    begun: list[int] = []

    def compute(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError(number)
        return number

    with pytest.raises(ValueError, match="3"):
        list(compute_on_threads(compute, range(10_000)))
    assert len(begun) < 10_000 and torch.get_num_threads() == before


def test_batches_hold_every_row_and_few_tokens():
    lengths = [1, 1, 2, 40, 40, 300, 3000, 9000]
    batches = _batches(range(len(lengths)), lengths)
    assert [row for batch in batches for row in batch] == [*range(len(lengths))]
    for batch in batches:
        tokens = len(batch) * max(lengths[row] for row in batch)
        assert tokens <= _BATCH_TOKENS or len(batch) == 1
    assert len(batches) == 3
