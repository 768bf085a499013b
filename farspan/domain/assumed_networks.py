"""Known machines: what the network between hosts is taken to carry where nothing else is known."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, NamedTuple

import msgspec

from farspan.domain.decoding import decode_yaml
from farspan.domain.units import parse_rate, parse_seconds


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A maker's host by its shape, `devices` devices of one of the `kinds`, with the rates and the
    round trip of its network as text."""

    kinds: tuple[str, ...]
    devices: Annotated[int, msgspec.Meta(ge=2)]
    network: str
    rtt: str
    least: str
    source: str
    checked: str


class AssumedNetwork(NamedTuple):
    """Bytes a second and the round trip that are assumed between two hosts, the least and the most
    rate that such hosts are found to have, and the known machine of that shape."""

    rate: float
    least: float
    most: float
    rtt_s: float
    machine: str = ""


#: Between two hosts of a site, both unknown: 10 Gbit/s Ethernet, whose round trip
#: through one switch and two kernels is about 0.1 ms. They have what offices have, up to what
#: clouds give VMs with a T4, an A30 or an A100
#: (cloud.google.com/compute/docs/gpus/gpu-network-bandwidth).
UNKNOWN_SITE = AssumedNetwork(rate=10e9 / 8, least=1e9 / 8, most=100e9 / 8, rtt_s=1e-4)
#: Between two sites without figures: what research networks and cloud regions commonly
#: grant. A tenth and ten times of it are a choice. Its round trip is always given.
UNKNOWN_LINK = AssumedNetwork(rate=1e9 / 8, least=0.1e9 / 8, most=10e9 / 8, rtt_s=math.nan)


@functools.cache
def load_machines() -> dict[str, Machine]:
    """Every machine of `catalog/machines.yaml`, by its name."""
    text = resources.files("farspan.catalog").joinpath("machines.yaml").read_bytes()
    return decode_yaml(text, dict[str, Machine])


def known_network(kinds: Sequence[str], joined: Sequence[str]) -> AssumedNetwork | None:
    """Find the network of the known machine that has devices of these kinds, joined by these kinds
    of interconnect; None for a host of another shape."""
    if set(joined) != {"nvlink"} or len(set(kinds)) != 1:
        return None
    for name, machine in load_machines().items():
        if kinds[0] in machine.kinds and len(kinds) == machine.devices:
            rate = parse_rate(machine.network)
            return AssumedNetwork(
                rate=rate,
                least=parse_rate(machine.least),
                most=rate,
                rtt_s=parse_seconds(machine.rtt),
                machine=name,
            )
    return None
