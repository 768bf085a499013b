"""`estimate`: what any Plan would take. It reads the plan's structure, never the name of the technique that made it."""

from __future__ import annotations

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan, Stage
from farspan.domain.probe import ProbeResult, Speed
from farspan.domain.results import Estimate
from farspan.estimate.memory import activation_bytes_per_row, memory_bytes

#: Share of a run that validation, checkpoints, start-up and noise take beside its steps. A planning margin.
RESERVE = 0.1

#: Factors on the predicted step. Noise between runs of one worker on a shared machine was 20-30 %; workers that
#: share a machine's memory and links also slow each other down, which one worker's trial cannot show.
_ONE_WORKER = (0.75, 1.3)
_SEVERAL_WORKERS = (0.75, 2.0)


#: What an estimate over several hosts leaves out in this version.
BETWEEN_HOSTS = "what gradients take between hosts is not counted: on a slow link a step takes much longer"


def crowding(cluster: Cluster) -> float:
    """CPU workers' threads for each core of the most crowded host, at least 1: so many share one core's speed."""
    shares = [1.0]
    for host in cluster.hosts:
        if host.cpus:
            shares.append(sum(device.threads for device in host.devices if device.backend == "cpu") / host.cpus)
    return max(shares)


def step_seconds(rows: int, seq_len: int, speed: Speed, cluster: Cluster) -> float:
    """A step in which the busiest worker reads `rows` sequences, from the probed speed of one worker alone."""
    return rows * seq_len / speed.tokens_per_s * crowding(cluster)


def estimate(plan: Plan, cluster: Cluster, probe: ProbeResult) -> Estimate:
    """Step time from the probed speed of one worker, scaled to the rows of the busiest rank; memory by formula.

    Raises KeyError where the probe did not measure the plan's precision.
    """
    train, speed = plan.train, probe.speeds[plan.train.precision]
    stage = _only_stage(plan)
    workers = len(stage.mesh.ranks)
    step_s = step_seconds(max(stage.rows), train.seq_len, speed, cluster)
    run_s = train.steps * step_s / (1 - RESERVE)
    if train.deadline_s is not None:
        run_s = min(run_s, train.deadline_s)
    price = hourly_price(cluster)
    return Estimate(
        step_s=step_s,
        run_s=run_s,
        tokens_per_s=train.tokens_per_step / step_s,
        memory_bytes=_memory(plan, stage, probe, speed),
        usd=None if price is None else price * run_s / 3600,
        interval=_ONE_WORKER if workers == 1 else _SEVERAL_WORKERS,
        assumptions=_assumptions(plan, stage, probe, crowding(cluster)),
    )


def hourly_price(cluster: Cluster) -> float | None:
    """US dollars an hour for every device together; None where any price is unknown."""
    prices = [device.usd_per_hour for device in cluster.devices]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def _only_stage(plan: Plan) -> Stage:
    if len(plan.replicas) != 1 or len(plan.replicas[0].stages) != 1:
        raise ValueError("a plan of this version has one replica of one stage")
    return plan.replicas[0].stages[0]


def _memory(plan: Plan, stage: Stage, probe: ProbeResult, speed: Speed) -> int:
    """The probe's peak, moved to the plan's microbatch; the formula alone where the probe used other lengths."""
    backend = plan.devices[0].backend
    bucket = stage.grad_sync.bucket_bytes if len(stage.mesh.ranks) > 1 else 0
    if probe.seq_len != plan.train.seq_len:
        return memory_bytes(plan.model, plan.train, stage.micro_rows, backend) + bucket
    more_rows = stage.micro_rows - probe.rows
    per_row = activation_bytes_per_row(plan.model, plan.train, backend)
    return max(0, speed.memory_bytes + more_rows * per_row) + bucket


def _assumptions(plan: Plan, stage: Stage, probe: ProbeResult, crowd: float) -> tuple[str, ...]:
    found = [
        f"each worker keeps the {plan.train.precision} speed of the trial "
        f"({probe.rows} sequences of {probe.seq_len} tokens at a time)",
        f"{RESERVE:.0%} of the run goes to validation, checkpoints and noise",
    ]
    if len(stage.mesh.ranks) > 1:
        found.append("sums of gradients hide behind the backward pass, and workers do not slow each other down")
    if len({device.host for device in plan.devices}) > 1:
        found.append(BETWEEN_HOSTS)
    if crowd > 1:
        found.append(f"{crowd:.3g} threads share each core, and its speed")
    if plan.train.deadline_s is not None:
        found.append("the deadline ends the run if the steps do not")
    return tuple(found)
