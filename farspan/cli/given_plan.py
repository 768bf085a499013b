"""What `farspan price` shows of one plan, that a person wrote or farspan did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.paint import paint, painter, width
from farspan.cli.plan_table import paragraph
from farspan.domain.model import parameters
from farspan.domain.units import (
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_usd,
    short_time,
)
from farspan.domain.words import joined, listed, stage_words
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.app.given_plans import PricedPlan
    from farspan.domain.plan import Replica


def say_picture(found: PricedPlan, console: Console) -> None:
    """Print what runs where, a step in time, and memory."""
    from farspan.planning.why import costs_of
    from farspan.report.plan_picture import picture
    from farspan.report.plan_terminal import show

    console.say()
    drawn = picture(found.plan, found.estimate, costs_of(found.plan, found.cluster))
    colours = painter(json=console.json)
    for line in show(drawn, width()):
        painted = "".join(paint(text, tint, colours) for text, tint in line)
        console.say(painted.rstrip(), painted=True)


def say(found: PricedPlan, console: Console) -> None:
    """The plan, what a step of it takes, what every device holds, what it sends, and what all of
    that assumes."""
    colours = painter(json=console.json)
    console.say(paragraph(_question(found)))
    console.say()
    for number, replica in enumerate(found.plan.replicas):
        before = f"replica {number + 1}, " if len(found.plan.replicas) > 1 else ""
        for s, stage in enumerate(replica.stages):
            rows = f"{listed([str(count) for count in stage.rows])} rows"
            text = f"{before}stage {s + 1} on {_on(found, stage.mesh.ranks)}"
            words = stage_words(stage, found.plan.model.layers)
            console.say(paragraph(f"{text}: {words}; {rows}", hang=2))
        console.say(paragraph(f"{before}{_parts(replica)}"))
    if (sync := found.plan.sync) is not None:
        console.say(f"replicas meet every {counted(sync.every, 'step')}, in {sync.bits} bits")
    console.say()
    for sentence in (_step(found), _speed(found)):
        console.say(paragraph(sentence))
    console.say()
    for line in _memory(found, colours=colours):
        console.say(line, painted=True)
    console.say(paragraph(_verdict(found)))
    parts = (
        ("What it sends", _sent(found)),
        ("Assumed", [f"{said}." for said in found.assumptions]),
    )
    for heading, sentences in parts:
        if sentences:
            console.say(f"\n{paint(heading, 'strong', colours)}", painted=True)
        for sentence in sentences:
            console.say(paragraph(f"- {sentence}", hang=2))


def _question(found: PricedPlan) -> str:
    model, train = found.plan.model, found.plan.train
    kinds = [found.cluster.devices[place].kind for place in _places(found)]
    devices = joined([f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)])
    return (
        f"{model.family}, {model.layers} layers x {model.d_model}, "
        f"{format_count(parameters(model))} parameters; "
        f"{counted(train.steps, 'step')} of {train.batch} x {train.seq_len} tokens, "
        f"{train.precision}; {devices}; "
        f"engine {found.plan.engine}"
    )


def _places(found: PricedPlan) -> list[int]:
    """The place in the cluster of each rank's device."""
    names = [
        (host.name, index) for host in found.cluster.hosts for index in range(len(host.devices))
    ]
    return [names.index((at.host, at.index)) for at in found.plan.devices]


def _on(found: PricedPlan, ranks: tuple[int, ...]) -> str:
    """`a:0-3 and b:0`."""
    runs: list[tuple[str, int, int]] = []
    for at in (found.plan.devices[rank] for rank in ranks):
        if runs and runs[-1][0] == at.host and runs[-1][2] == at.index - 1:
            runs[-1] = (at.host, runs[-1][1], at.index)
        else:
            runs.append((at.host, at.index, at.index))
    return joined(
        [f"{host}:{first}" + (f"-{last}" if last > first else "") for host, first, last in runs]
    )


def _parts(replica: Replica) -> str:
    text = f"{counted(replica.microbatches, 'microbatch')} a step"
    if len(replica.stages) == 1:
        return text
    edges = listed(
        [f"{edge.bits} bits over {counted(edge.streams, 'stream')}" for edge in replica.edges]
    )
    return f"{text}, in flight {', '.join(map(str, replica.in_flight))}; between stages {edges}"


def _step(found: PricedPlan) -> str:
    parts = {
        "compute": found.compute_s,
        "exposed communication": found.communication_s,
        "waiting for other stages": found.bubble_s,
    }
    low, high = (short_time(factor * found.step_s) for factor in found.interval)
    split = joined(
        [
            f"{short_time(part)} {name}"
            for name, part in parts.items()
            if part >= 0.0005 * found.step_s
        ]
    )
    return f"A step takes {short_time(found.step_s)} ({low} to {high}): {split}."


def _speed(found: PricedPlan) -> str:
    peak = "" if found.mfu is None else f", {found.mfu:.1%} of the data sheets'"
    text = (
        f"{found.tokens_per_s:,.0f} tokens a second, {found.tflops_per_device:.3g} TFLOP/s a "
        f"device{peak}."
    )
    if found.plan.train.steps == 1:
        return text
    money = "" if found.usd is None else f", {'free' if found.usd == 0 else format_usd(found.usd)}"
    text += f" All steps take {format_seconds(found.whole_s)}{money}."
    if found.token_efficiency != 1.0:
        text += (
            f" The loss of synchronous training takes {1 / found.token_efficiency:.3g} x the "
            f"tokens: {format_seconds(found.equal_loss_s)}."
        )
    return text


def _memory(found: PricedPlan, *, colours: bool) -> list[str]:
    """A line for each device; those of a host that hold as much share one."""
    lines: dict[tuple[str, ...], list[int]] = {}
    for rank, (part, place) in enumerate(zip(found.memory, _places(found), strict=True)):
        at, device = found.plan.devices[rank], found.cluster.devices[place]
        named = (part.weights, part.gradients, part.optimizer, part.activations, part.logits)
        parts = (*named, part.total - sum(named))
        holds = (f"{size / 1e9:.2f}" for size in parts)
        used = f"{part.total / 1e9:.2f} of {device.memory / 1e9:.3g}"
        lines.setdefault((at.host, device.kind, used, *holds), []).append(rank)
    rows = [
        [
            _on(found, tuple(sorted(ranks, key=lambda rank: found.plan.devices[rank].index))),
            *key[1:],
        ]
        for key, ranks in lines.items()
    ]
    heads = (
        "devices",
        "kind",
        "GB each",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "rest",
    )
    return table_lines(
        heads, rows, right=range(2, len(heads)), width=width(), gap=1, wrap=(0, 1), colours=colours
    )


def _verdict(found: PricedPlan) -> str:
    short = [
        (part.total - most, name)
        for part, most, name in zip(found.memory, found.capacity, found.devices, strict=True)
        if part.total > most
    ]
    if not short:
        return "It fits: every device has room for what it holds."
    lacking, name = max(short)
    return (
        f"It does not fit: {counted(len(short), 'device')} short of memory, {name} of "
        f"{format_bytes(lacking)} most."
    )


def _sent(found: PricedPlan) -> list[str]:
    """A sentence for everything that devices send each other in a step, before anything hides
    it."""
    from farspan.estimate.traffic import traffic
    from farspan.planning.why import costs_of, exchange_line

    costs = costs_of(found.plan, found.cluster)
    return [f"{exchange_line(exchange, costs)}." for exchange in traffic(found.plan, costs)]
