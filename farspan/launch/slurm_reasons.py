"""Reasons of waiting Slurm jobs that do not pass by waiting, with the key of run.yaml to change.

The names are those of squeue(1) and of Slurm's page on job reason codes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from farspan.domain.config import SlurmConfig
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal
from farspan.domain.suggest import any_key
from farspan.launch.slurm_client import QueuedJob
from farspan.launch.slurm_partitions import require_offered

#: The keys of run.yaml that each reason is about, and what it means.
LASTING_REASONS = {
    "PartitionConfig": (
        ("slurm.nodes", "slurm.cpus", "slurm.memory", "slurm.partition"),
        "it asks for more than its partition has or allows",
    ),
    "PartitionNodeLimit": (
        ("slurm.nodes",),
        "it asks for more nodes than its partition has or allows",
    ),
    "PartitionTimeLimit": (("slurm.time",), "its time is above the limit of its partition"),
    "BadConstraints": (("slurm.constraint",), "no node meets its constraints"),
    "AccountNotAllowed": (("slurm.account",), "its partition does not allow its account"),
    "InvalidAccount": (("slurm.account",), "there is no such account"),
    "QOSNotAllowed": (("slurm.qos",), "its account or partition does not allow its QOS"),
    "InvalidQOS": (("slurm.qos",), "there is no such QOS"),
    "DependencyNeverSatisfied": (("slurm.options",), "the job that it depends on has failed"),
}
#: Those that nodes which are down or drained have, too: then they pass.
AMBIGUOUS_REASONS = ("PartitionNodeLimit",)
#: Limits of a QOS or of an account that one job alone is above, or below.
JOB_LIMIT = re.compile(
    r"(?P<by>QOS|Assoc)(?P<bound>Max|Min)(?P<what>Node|Cpu|Mem|GRES|WallDuration).*"
)
LIMIT_KEYS = {
    "Node": "slurm.nodes",
    "Cpu": "slurm.cpus",
    "Mem": "slurm.memory",
    "GRES": "slurm.gres",
    "WallDuration": "slurm.time",
}
#: Those of jobs that somebody, or a failed start, holds back.
HELD_REASONS = ("JobHeldUser", "launch_failed_requeued_held")


class Stuck(NamedTuple):
    """Why a job never starts, and what mends it."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"it never starts: {self.why}; to mend it: {self.remedy}"


def find_stuck(job: QueuedJob, config: SlurmConfig | None = None) -> Stuck | None:
    """Return why a job of `farspan slurm` never starts, with what `sinfo` knows of the values of
    its `config`; None of a job that may start."""
    if job.state != "PENDING":
        return None
    if job.reason in HELD_REASONS:
        return Stuck("it is held", shell_line("scontrol", "release", job.id))
    lasting = LASTING_REASONS.get(job.reason) or _explain_limit(job.reason)
    if lasting is None:
        return None
    keys, why = lasting
    remedy = f"{shell_line('scancel', job.id)}, then change {any_key(keys)}"
    if config is not None:
        try:
            require_offered(config)
        except Refusal as refusal:
            unmet = refusal.problem
            if unmet.key is not None:
                why = f"{unmet.what} ({unmet.fact})"
                return Stuck(why, f"{shell_line('scancel', job.id)}, then {unmet.remedy}")
    if job.reason in AMBIGUOUS_REASONS:
        return None
    return Stuck(why, remedy)


def _explain_limit(reason: str) -> tuple[tuple[str, ...], str] | None:
    match = JOB_LIMIT.fullmatch(reason)
    # Limits of a user's jobs together pass as others of them end.
    if match is None or "PerUser" in reason or "PerAccount" in reason:
        return None
    side = "above" if match["bound"] == "Max" else "below"
    owner = "QOS" if match["by"] == "QOS" else "account"
    return (LIMIT_KEYS[match["what"]],), f"it is {side} a limit of its {owner}"
