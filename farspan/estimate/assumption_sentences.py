"""What an estimate takes for granted, in sentences: each names a figure that a measurement could
replace."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.units import format_bytes, format_rate
from farspan.estimate.compute import UNKNOWN_FLOPS, best_product, product_dtype
from farspan.estimate.network import UNKNOWN_LINK_BANDWIDTH, Network
from farspan.estimate.stage import Costs


def assumptions(plan: Plan, costs: Costs) -> tuple[str, ...]:
    """Sentences for what was not measured on this cluster."""
    return (
        *_assumed_networks(plan, costs),
        *_rates(costs),
        *_inside_hosts(plan, costs),
        *_staged_messages(plan, costs.network),
        *_links(plan, costs),
        *_run(plan, costs),
    )


def _assumed_networks(plan: Plan, costs: Costs) -> list[str]:
    """Return the networks inside sites whose rate neither the file nor a probe gives."""
    network, sites_by_text = costs.network, dict[str, list[str]]()
    hosts = [device.host for device in plan.devices]
    for (a, b), assumed in network.assumed(hosts).items():
        site, link = network.site(a), network.cluster.link(a, b)
        if site != network.site(b) or link is None:
            continue  # `_links` names lines between sites.
        if link.bandwidth is None and costs.engine.host_rate is not None:
            continue
        like = f", as of a {assumed.machine}" if assumed.machine else ""
        bounds = f"such hosts have {format_rate(assumed.least)} to {format_rate(assumed.most)}"
        text = (
            f"{format_rate(assumed.rate)} is assumed between hosts{like} ({bounds}); measure it: "
            f"{_probe_command(network.cluster)}"
        )
        sites = sites_by_text.setdefault(text, [])
        if site not in sites:
            sites.append(site)
    return [f"{_some(sites, 'sites')}: {text}" for text, sites in sites_by_text.items()]


def _probe_command(cluster: Cluster) -> str:
    """Return the command that measures a cluster. Nodes of Slurm are entered by srun: a job
    measures them."""
    if any("srun" in (host.enter or ()) for host in cluster.hosts):
        return "farspan slurm run.yaml --probe measured.yaml"
    return "farspan probe --cluster CLUSTER -o measured.yaml"


def _rates(costs: Costs) -> list[str]:
    engine, sentences = costs.engine, []
    for kind in dict.fromkeys(device.kind for device in costs.network.devices):
        device = next(device for device in costs.network.devices if device.kind == kind)
        dtype = product_dtype(device, costs.train.precision, engine)
        if device.times.units and not costs.timed(device):
            sentences.append(
                f"{kind} was timed with other units, dtypes or lengths of sequences; farspan probe "
                "measures these"
            )
        if device.learned.pace != 1.0:
            sentences.append(f"{kind} keeps the {dtype} speed of a short trial of this model")
        elif costs.timed(device):
            sentences.append(f"{kind} keeps the {dtype} speed that the model's units were timed at")
        elif any(dtype in rate.flops for rate in device.times.rates):
            sentences.append(
                f"{kind} keeps the {dtype} speed that its matrix products were measured at"
            )
        elif dtype in device.sheet.flops:
            reached = (
                engine.efficiency[dtype] * best_product(device, dtype) / device.sheet.flops[dtype]
            )
            share = (
                f"{reached:.0%} of its data sheet's {device.sheet.flops[dtype] / 1e12:.3g} TFLOP/s"
            )
            sentences.append(f"{kind} reaches {share} in {dtype}")
        else:
            known = UNKNOWN_FLOPS[device.backend] / 1e12
            unknown = f"{kind} has no known {dtype} speed: {known:.3g} TFLOP/s is assumed"
            sentences.append(f"{unknown}; farspan probe measures it")
    return sentences


def _inside_hosts(plan: Plan, costs: Costs) -> list[str]:
    """Rates between devices of one host that nobody measured: of the rings that the plan makes."""
    network, hosts_by_text = costs.network, dict[str, list[str]]()
    counts = Counter(network.hosts)
    rings = _ring_rates(plan, network)
    for host in network.cluster.machines:
        rates = rings.get(host.name, {})
        guessed = {count: rate for count, rate in rates.items() if rate != host.local_rate}
        if not rates and _staged_edges(plan, network):
            continue  # Its devices exchange nothing but messages.
        if counts[host.name] > 1 and host.local_rate is None:
            if len(set(rates.values())) > 1:
                text = f"{_rings(rates)}; farspan probe measures a ring of all"
            else:
                rate = next(iter(rates.values()), network.local_rate[host.name])
                text = (
                    f"devices of the host exchange {format_rate(rate)} each way; farspan probe "
                    "measures it"
                )
            hosts_by_text.setdefault(text, []).append(host.name)
        elif counts[host.name] > 1 and guessed:
            text = f"{_rings(guessed)}, by the catalogue's shares of the measured ring of all"
            hosts_by_text.setdefault(text, []).append(host.name)
    return [f"{_some(hosts, 'hosts')}: {text}" for text, hosts in hosts_by_text.items()]


def _staged_edges(plan: Plan, network: Network) -> set[tuple[int, int]]:
    """Return the neighbours of pipelines in one host that exchange messages through its memory."""
    edges = set[tuple[int, int]]()
    for replica in plan.replicas:
        for before, after in pairwise(replica.stages):
            pair = (before.mesh.ranks[-1], after.mesh.ranks[0])
            if network.hosts[pair[0]] != network.hosts[pair[1]]:
                continue
            if network.wire(*pair, collective=False).copy_byte_s:
                edges.add(pair)
    return edges


def _staged_messages(plan: Plan, network: Network) -> list[str]:
    """Return a sentence for messages between the GPUs of a host."""
    edges = _staged_edges(plan, network)
    if not edges:
        return []
    wires = [network.wire(a, b, collective=False) for a, b in edges]
    slowest = min(1 / (1 / wire.rate + wire.copy_byte_s) for wire in wires)
    return [
        "messages between stages in one host go through its memory and its sockets, at "
        f"{format_rate(slowest)} with both copies"
    ]


def _ring_rates(plan: Plan, network: Network) -> dict[str, dict[int, float]]:
    """Bytes a second of the plan's rings inside each host, by their number of devices: of each
    number the slowest."""
    rates: dict[str, dict[int, float]] = {}
    groups: set[tuple[int, ...]] = set()
    for replica in plan.replicas:
        for stage in replica.stages:
            groups |= set(stage.mesh.transposed)
            for axis in stage.mesh.axes:
                groups |= set(stage.mesh.groups(axis))
        for before, after in pairwise(replica.stages):
            groups.add((before.mesh.ranks[-1], after.mesh.ranks[0]))
    groups -= _staged_edges(plan, network)
    for group in groups:
        by_host: dict[str, list[int]] = {}
        for rank in group:
            by_host.setdefault(network.hosts[rank], []).append(rank)
        for host, ranks in by_host.items():
            if len(ranks) > 1:
                rate = network.ring_rate(ranks)
                known = rates.setdefault(host, {})
                known[len(ranks)] = min(rate, known.get(len(ranks), rate))
    return rates


def _rings(rates: dict[int, float]) -> str:
    """Rates of rings by their number of devices, in words."""
    each = [f"of {count} devices {format_rate(rate)}" for count, rate in sorted(rates.items())]
    return f"rings {', '.join(each)} each way"


def _links(plan: Plan, costs: Costs) -> list[str]:
    """Return one sentence for all pairs of sites with the same link."""
    used = list(dict.fromkeys(device.host for device in plan.devices))
    network, seen, pairs_by_text = costs.network, set[str](), dict[str, list[str]]()
    for i, a in enumerate(used):
        for b in used[i + 1 :]:
            pair = " - ".join(dict.fromkeys(network.site(host) for host in (a, b)))
            if pair in seen or (link := network.cluster.link(a, b)) is None:
                # Told already; or nothing leads from one to the other, and the plan sends nothing.
                continue
            seen.add(pair)
            assumed = network.cluster.assumed_network(a, b)
            inside = network.site(a) == network.site(b)
            if link.bandwidth is None and (costs.engine.host_rate or not inside):
                rate = costs.engine.host_rate or UNKNOWN_LINK_BANDWIDTH
                text = (
                    f"the line's rate is unknown, {format_rate(rate)} is assumed; farspan probe "
                    "measures it"
                )
                pairs_by_text.setdefault(text, []).append(pair)
            if link.window is None and not link.in_flight and link.rtt_s > 1e-3:
                text = f"a TCP stream has {format_bytes(costs.engine.window)} under way"
                pairs_by_text.setdefault(text, []).append(pair)
            if link.origin == "derived" and not (inside and assumed):
                pairs_by_text.setdefault(
                    "the network inside a site, or derived from other links", []
                ).append(pair)
    return [f"{_some(pairs, 'pairs')}: {text}" for text, pairs in pairs_by_text.items()]


def _some(host_names: list[str], what: str) -> str:
    return ", ".join(host_names[:2]) + (
        f" and {len(host_names) - 2} other {what}" if len(host_names) > 2 else ""
    )


def _run(plan: Plan, costs: Costs) -> list[str]:
    sentences = ["10 % of the run goes to validation, checkpoints and noise"]
    if any(device.sheet.watts for device in costs.network.devices):
        sentences.append("every device draws its board's power throughout")
    if (workers_per_core := max(kind[1] for kind in costs.signature)) > 1:
        sentences.append(f"{workers_per_core:.3g} threads share each core, and its speed")
    if plan.train.deadline_s is not None:
        sentences.append("the deadline ends the run if the steps do not")
    return sentences
