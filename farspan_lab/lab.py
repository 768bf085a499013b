"""What a lab is: sites on one machine, the devices in them, and both directions of every link
between them."""

from __future__ import annotations

import msgspec

from farspan.domain.problems import Refusal

#: Below this round trip a link without rate, loss and jitter needs no emulation: a veth pair has
#: about 0.05 ms.
NEAR_S = 1e-3


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker gets. `speed` and `memory` are None where nothing holds a worker to them."""

    #: Share of `cores` cores' time.
    speed: float | None
    cores: int
    #: Bytes; a worker that takes more is killed.
    memory: int | None
    #: The cores that it runs on, perhaps with others.
    cpus: tuple[int, ...] = ()
    #: Folders of the control groups that hold it to `speed` and `memory`.
    cgroups: tuple[str, ...] = ()


class Site(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    number: int
    devices: tuple[Device, ...]

    @property
    def address(self) -> str:
        return f"10.77.{self.number}.1"


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two sites."""

    source: str
    target: str
    delay_s: float
    #: The delay varies evenly by up to so much either way; packets keep their order.
    jitter_s: float = 0.0
    #: Bytes a second, of packets as the kernel hands them over; None without a cap.
    bandwidth: float | None = None
    #: Chance of each segment to be lost.
    loss: float = 0.0
    up: bool = True

    @property
    def near(self) -> bool:
        """Whether a veth pair does as well as the relay, or better."""
        return (
            self.up
            and 2 * self.delay_s < NEAR_S
            and not (self.bandwidth or self.loss or self.jitter_s)
        )


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """All of a lab. In a Status, TCP is as the kernel says it is; before, as it was asked for."""

    name: str
    sites: tuple[Site, ...]
    links: tuple[Link, ...]
    congestion: str
    #: Bytes that one connection may have under way.
    window: int
    #: What this machine cannot give, in words.
    notes: tuple[str, ...] = ()


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one direction of a link has carried. What goes past the relay, over a veth pair, is not
    counted."""

    source: str
    target: str
    relayed: bool
    bytes: int
    packets: int
    dropped: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A lab that is up, as its supervisor tells it."""

    lab: Lab
    pid: int
    #: Paths of each site's mnt, uts and net namespaces.
    namespaces: dict[str, dict[str, str]]
    traffic: tuple[Traffic, ...]
    #: The relay's processor seconds, and the seconds since it began.
    relay_cpu_s: float
    up_s: float
    #: Whether the relay goes before all workers when both want a core.
    realtime: bool


def unavailable(what: str, where: object, fact: object, remedy: str) -> Refusal:
    return Refusal("lab-unavailable", what=what, where=where, fact=str(fact), remedy=remedy)


def out_of_range(where: str, fact: str, remedy: str) -> Refusal:
    return Refusal(
        "out-of-range", what="no lab can have this", where=where, fact=fact, remedy=remedy
    )
