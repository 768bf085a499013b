"""Expected time of a run on machines that are taken away, and the best time between its saves (Daly
2006)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from farspan.domain.cluster import Cluster

#: Seconds from a fault, or from stopping workers, to the next training step: the median of 44
#: restarts (docs/reliability.md), rounded up.
RESTART_S = 15.0
#: Bytes of a checkpoint for a parameter: weights and both moments of AdamW, in fp32.
STATE_BYTES = 12
#: Bytes a second at which the snapshot is taken that a step waits for. Assumed: half of what PCIe
#: carries (10 GB/s of the engine's host).
SNAPSHOT_RATE = 5e9
#: Bytes a second at which the copy reaches the disk while training continues. Assumed: a SATA SSD.
DISK_RATE = 5e8
#: Seconds between saves at least.
LEAST_INTERVAL_S = 10.0
#: Exponents are cut here: a run that is interrupted so often never ends.
MOST_EXPONENT = 30.0


class Interruptions(msgspec.Struct, frozen=True, kw_only=True):
    """How often a run is interrupted, and what a save and a restart take. Seconds."""

    #: Interruptions a second: of all hosts that the run uses, as each of them stops it.
    per_s: float
    #: A step waits for each save.
    save_s: float
    #: From the loss of a host to the first step, and the work done while a save was written.
    restart_s: float
    #: Between two saves.
    every_s: float
    #: Share of the interruptions after which the steps since a save are made again: after the
    #: others, survivors write the last one.
    again: float = 1.0

    def expected_s(self, work_s: float) -> float:
        """Return the expected seconds of `work_s` of undisturbed training.

        Exponential interruptions, also of restarts and saves: the renewal equation of a segment of
        work and its save, which begins again after a loss. Where all interruptions lose it, this is
        eq. 20 of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
        restart dumps", 2006. Work that ends before the first save is one segment without a save.
        """
        segment_s = min(self.every_s, work_s)
        if self.per_s == 0 or segment_s <= 0:
            return work_s + self.save_s * math.floor(work_s / self.every_s)
        segments = work_s / segment_s
        if work_s > self.every_s:
            segment_s += self.save_s
        losing = self.per_s * self.again
        keeping = self.per_s - losing
        # A restart, which a further interruption starts over.
        exponent = min(self.restart_s * self.per_s, MOST_EXPONENT)
        restart_s = math.expm1(exponent) / self.per_s
        # One that keeps its segment, unless an interruption that loses it comes before its end.
        uninterrupted = math.exp(-exponent)
        last_try = 1 - (1 - uninterrupted) * keeping / self.per_s
        kept = uninterrupted / last_try
        keeping_s = (1 - uninterrupted) / self.per_s / last_try
        loss_rate = losing + keeping * (1 - kept)
        slowdown = 1 + keeping * keeping_s
        if loss_rate == 0:
            return segments * segment_s * slowdown
        tries = math.expm1(min(loss_rate * segment_s, MOST_EXPONENT))
        return segments * tries * (slowdown / loss_rate + restart_s)

    def as_json(self, work_s: float) -> dict[str, float]:
        """Return the figures of `work_s` of training as `--json` has them."""
        expected_s = self.expected_s(work_s)
        return {
            "per_hour": self.per_s * 3600,
            "save_s": self.save_s,
            "restart_s": self.restart_s,
            "checkpoint_every_s": self.every_s,
            "again": self.again,
            "undisturbed_s": work_s,
            "expected_s": expected_s,
            "expected_interruptions": self.per_s * expected_s,
        }


def best_interval(per_s: float, save_s: float) -> float:
    """Return the seconds of work between saves that make the expected time least (Daly 2006, eq.
    37); infinite where nothing interrupts."""
    if per_s == 0:
        return math.inf
    mean_s = 1 / per_s
    if save_s >= 2 * mean_s:
        return mean_s
    ratio = save_s / (2 * mean_s)
    return math.sqrt(2 * save_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expect_interruptions(
    cluster: Cluster,
    hosts: Iterable[str],
    parameters: int,
    every_s: float,
    *,
    again: float = 1.0,
) -> Interruptions | None:
    """Return the interruptions of a run on these hosts, `again` as `Interruptions` has it; None
    where no rate is given."""
    per_s = cluster.preemptions_per_s(hosts)
    if per_s == 0:
        return None
    state = STATE_BYTES * parameters
    restart_s = RESTART_S + state / DISK_RATE
    save_s = state / SNAPSHOT_RATE
    return Interruptions(
        per_s=per_s, save_s=save_s, restart_s=restart_s, every_s=every_s, again=again
    )


def choose_save_interval(cluster: Cluster, parameters: int) -> float | None:
    """Return the seconds between saves for a run on all hosts of a cluster; None where no rate is
    given."""
    hosts = [host.name for host in cluster.machines]
    expected = expect_interruptions(cluster, hosts, parameters, math.inf)
    if expected is None:
        return None
    # One save is written at a time.
    written_s = STATE_BYTES * parameters / DISK_RATE
    best_s = best_interval(expected.per_s, expected.save_s)
    return max(best_s, written_s, LEAST_INTERVAL_S)
