"""GPUs that are not here: what PyTorch says of them, patched in."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

GB = 10**9
#: `torch.cuda.get_arch_list()` of the wheels of PyTorch 2.13 for Linux x86-64.
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


class Card(NamedTuple):
    """A GPU as PyTorch has it; `gcn` is AMD's name of its architecture."""

    name: str
    capability: tuple[int, int]
    memory: int
    archs: tuple[str, ...] = CU130
    cuda: str | None = "13.0"
    gcn: str = ""


T4 = Card("Tesla T4", (7, 5), 16 * GB)
V100 = Card("Tesla V100-SXM2-16GB", (7, 0), 17 * GB, CU126, "12.6")
A100 = Card("NVIDIA A100-SXM4-40GB", (8, 0), 42 * GB)
SLICE = Card("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 5 * GB)
RTX4090 = Card("NVIDIA GeForce RTX 4090", (8, 9), 25 * GB)
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 85 * GB)
B200 = Card("NVIDIA B200", (10, 0), 192 * GB)
MI300 = Card("AMD Instinct MI300X", (9, 4), 206 * GB, ("gfx942",), None, "gfx942:sramecc+:xnack-")
MI50 = Card("AMD Instinct MI50", (9, 0), 17 * GB, ("gfx906",), None, "gfx906:sramecc+:xnack-")


def pose_as_card(
    monkeypatch: pytest.MonkeyPatch,
    card: Card,
    *,
    free: int | None = None,
    failure: str = "",
    triton: bool = True,
) -> torch.device:
    """Let PyTorch say that it sees this card alone, with `free` bytes (None: all), or that opening
    it fails."""

    def read_memory(device: object = None) -> tuple[int, int]:
        if failure:
            raise RuntimeError(failure)
        return (card.memory if free is None else free), card.memory

    def find_spec(name: str) -> object:
        return object() if triton or name != "triton" else None

    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.memory,
        gcnArchName=card.gcn,
        major=card.capability[0],
        minor=card.capability[1],
    )
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: list(card.archs),
        "mem_get_info": read_memory,
        "memory_reserved": lambda device=None: 0,
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", card.cuda)
    monkeypatch.setattr(torch.version, "hip", None if card.cuda else "7.2")
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return torch.device("cuda", 0)
