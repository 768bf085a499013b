"""What an examination of a device finds: the fast paths that it takes and why, and whether other
programs hold it."""

from __future__ import annotations

from typing import Literal

import msgspec

from farspan.domain.gpus import Capability
from farspan.domain.problems import Finding
from farspan.domain.units import format_bytes

#: Other programs that hold less than this share of a GPU's memory are not worth a word. A choice:
#: it is above the CUDA context of this process, 0.3 to 0.6 GB of cards with 8 GB and more.
MIN_HELD_SHARE = 0.1
#: What finds out which programs hold a GPU.
LIST_HOLDERS = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
#: What frees a GPU that another program has opened for itself alone.
FREE_REMEDY = f"{LIST_HOLDERS}; end that program, or share the GPU: sudo nvidia-smi -c DEFAULT"


class FastPath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice of the runtime on a device: what it takes, and why."""

    name: Literal["dtype", "attention", "head loss", "compile", "graph", "wheel"]
    takes: str
    why: str

    def __str__(self) -> str:
        return f"{self.takes}: {self.why}"


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as its own PyTorch sees it."""

    name: str
    backend: Literal["cpu", "cuda", "mps"]
    paths: tuple[FastPath, ...]
    capability: Capability | None = None
    #: Bytes of a GPU, and those that are free; None where it does not say.
    memory: int | None = None
    free: int | None = None
    #: Why it cannot be opened, in the driver's words.
    failure: str = ""
    #: The slice of a divided GPU (MIG) that it is, as a cluster file has it.
    slice: str = ""

    @property
    def title(self) -> str:
        if self.capability is None:
            return self.name
        return f"{self.name} ({self.capability[0]}.{self.capability[1]})"

    def list_findings(self, where: str) -> tuple[Finding, ...]:
        """List what keeps a run from having all of the device; `where` names the device."""
        if self.failure:
            return (
                Finding(
                    severity="refused",
                    code="device-busy",
                    what=f"{self.name} cannot be opened",
                    where=where,
                    fact=self.failure,
                    remedy=FREE_REMEDY,
                ),
            )
        fact = describe_held_memory(self.name, self.memory, self.free)
        if not fact:
            return ()
        return (
            Finding(
                severity="warned",
                code="device-busy",
                what=f"other programs hold memory of {self.name}",
                where=where,
                fact=fact,
                remedy=f"{LIST_HOLDERS}; end them, or hide it: CUDA_VISIBLE_DEVICES",
            ),
        )


def describe_held_memory(name: str, memory: int | None, free: int | None, own: int = 0) -> str:
    """Describe how much of a GPU's memory other programs hold; `own` bytes are this process's.
    Empty where it is little, or not known."""
    if memory is None or free is None:
        return ""
    others = memory - free - own
    if others < MIN_HELD_SHARE * memory:
        return ""
    return (
        f"{format_bytes(free)} of {format_bytes(memory)} are free on {name}: other programs hold "
        f"{format_bytes(others)}"
    )
