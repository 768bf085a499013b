"""How each device of a plan runs its step: eagerly or compiled, launched or recorded as a graph."""

from __future__ import annotations

from typing import Any

import msgspec

from farspan.domain.cluster import Cluster, Device
from farspan.domain.cost import Estimate
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.plan_words import join_words
from farspan.domain.problems import Problem
from farspan.domain.train import TrainSpec
from farspan.estimate.stage import Costs
from farspan.estimate.step_kernels import step_kernels
from farspan.semantics.compile_choice import (
    Choice,
    choose_compile,
    choose_graph,
    find_graph_obstacle,
    is_for_gpus,
    with_choices,
)


def settle_asked(
    train: TrainSpec, cluster: Cluster, *, compiled: Any = "auto", graph: Any = "auto"
) -> TrainSpec:
    """Return the training with what run.yaml asks of compiling and of graphs. Where no device could
    take either, `auto` is no and the training is what it was before there was one."""
    if not is_for_gpus(cluster):
        compiled = compiled is True
        graph = graph is True
    return msgspec.structs.replace(train, compile=compiled, graph=graph or msgspec.UNSET)


def choose_modes(plan: Plan, costs: Costs, estimate: Estimate) -> list[tuple[Choice, Choice]]:
    """Choose for each device of a plan whether it compiles, and whether it records its step."""
    replica = plan.replicas[0]
    ways: dict[int, int] = {}
    for other in plan.replicas:
        for stage in other.stages:
            ways |= dict.fromkeys(stage.mesh.ranks, stage.mesh.size("tensor"))
    graph = Choice(False, find_graph_obstacle(plan))
    if not graph.reason:
        kernels = step_kernels(replica, costs)
        device = costs.network.devices[0]
        graph = choose_graph(plan, device, kernels.launching, kernels.computing)
    hosts = {host.name: host for host in costs.network.cluster.hosts}
    chosen = []
    for rank, at in enumerate(plan.devices):
        device = costs.network.devices[rank]
        compiled = choose_compile(device, hosts[at.host].triton, estimate.run_s, ways[rank])
        chosen.append((compiled, graph))
    return chosen


def settle_modes(plan: Plan, costs: Costs, estimate: Estimate) -> Plan:
    """Return the plan with what was chosen for each device, where its training leaves that to the
    rules."""
    train = plan.train
    if train.compile != "auto" and not train.graph:
        return plan
    devices: list[PlannedDevice] = []
    for at, modes in zip(plan.devices, choose_modes(plan, costs, estimate), strict=True):
        devices.append(with_choices(at, train, *modes))
    return msgspec.structs.replace(plan, devices=tuple(devices))


def find_graph_problem(plan: Plan) -> Problem | None:
    """Return why a plan cannot run as its training asks: with a graph where there can be none."""
    obstacle = find_graph_obstacle(plan)
    if plan.train.graph is not True or not obstacle:
        return None
    return Problem(
        code="cannot-plan",
        what="the step cannot be recorded as one CUDA graph",
        where="run.yaml, key train.graph",
        fact=obstacle,
        remedy="set train.graph: auto",
        key="train.graph",
    )


def explain_modes(plan: Plan, costs: Costs, estimate: Estimate) -> dict[str, tuple[Any, str]]:
    """Explain the choices for a plan's devices: value and reason of `train.compile` and
    `train.graph`, where they were left to the rules."""
    modes = choose_modes(plan, costs, estimate)
    explained = {}
    for key, asked, place in (
        ("train.compile", plan.train.compile, 0),
        ("train.graph", plan.train.graph, 1),
    ):
        if asked == "auto":
            choices = [pair[place] for pair in modes]
            explained[key] = _explain_choices(choices, costs.network.devices)
    return explained


def _explain_choices(choices: list[Choice], devices: list[Device]) -> tuple[Any, str]:
    """Return the common choice, or the kinds of each, and the reasons."""
    reasons = "; ".join(dict.fromkeys(choice.reason for choice in choices))
    values = {choice.value for choice in choices}
    if len(values) == 1:
        return values.pop(), f"auto: {reasons}"
    kinds = {value: dict[str, None]() for value in (True, False)}
    for choice, device in zip(choices, devices, strict=True):
        kinds[choice.value][device.kind] = None
    compiled = join_words(list(kinds[True]))
    eager = join_words(list(kinds[False]))
    return f"true on {compiled}, false on {eager}", f"auto: {reasons}"
