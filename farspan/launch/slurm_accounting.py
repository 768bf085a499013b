"""What Slurm jobs used, by `sacct`, where the site keeps accounts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from farspan.domain.problems import Refusal
from farspan.domain.units import counted, format_bytes, format_seconds
from farspan.launch.slurm_client import has_slurm, run_client


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """What jobs used, by `sacct`: all their starts together, seconds, bytes and joules; None where
    Slurm does not record it."""

    jobs: int
    starts: int
    elapsed_s: float
    cpu_s: float
    memory_bytes: int | None
    energy_j: float | None

    def __str__(self) -> str:
        jobs = f"{counted(self.jobs, 'Slurm job')} in {counted(self.starts, 'start')}"
        facts = [f"{format_seconds(self.elapsed_s)} elapsed"]
        facts.append(f"{format_seconds(self.cpu_s)} of CPU")
        if self.memory_bytes is not None:
            facts.append(f"{format_bytes(self.memory_bytes)} at most in a step")
        if self.energy_j is not None:
            facts.append(f"{self.energy_j / 3.6e6:.3g} kWh")
        return f"{jobs}: {', '.join(facts)}"


def read_accounting(jobs: Sequence[str]) -> Accounting | None:
    """Read the usage of jobs; None where there is no accounting, or no Slurm, here."""
    if not jobs or not has_slurm():
        return None
    fields = "JobID,ElapsedRaw,TotalCPU,MaxRSS,ConsumedEnergyRaw"
    words = ["sacct", "--duplicates", "--noheader", "--parsable2", "--noconvert"]
    try:
        done = run_client([*words, f"--jobs={','.join(jobs)}", f"--format={fields}"])
    except Refusal:
        return None
    return None if done.returncode else parse_accounting(done.stdout)


def parse_accounting(text: str) -> Accounting | None:
    """Parse what sacct printed: a line a job, which sums up its steps, and a line a step. None
    where no job is there."""
    numbers = set[str]()
    starts = 0
    elapsed_s = cpu_s = 0.0
    memory = list[int]()
    energy = list[float]()
    for line in text.splitlines():
        name, elapsed, cpu, peak, joules = line.split("|")
        is_step = "." in name
        if peak and (number := re.fullmatch(r"(\d+)([KMGT]?)", peak)):
            memory.append(int(number[1]) * 1024 ** " KMGT".index(number[2] or " "))
        if is_step:
            continue
        numbers.add(name.partition("+")[0])
        starts += 1
        elapsed_s += float(elapsed or 0)
        cpu_s += parse_cpu_time(cpu)
        if joules.isdigit() and int(joules) > 0:
            energy.append(float(joules))
    if not starts:
        return None
    return Accounting(
        jobs=len(numbers),
        starts=starts,
        elapsed_s=elapsed_s,
        cpu_s=cpu_s,
        memory_bytes=max(memory, default=None),
        energy_j=sum(energy) if energy else None,
    )


def parse_cpu_time(text: str) -> float:
    """Parse `[DD-[HH:]]MM:SS[.MS]` as seconds."""
    days, _, clock = text.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part or 0)
    return seconds + 86400 * int(days or 0)
