"""run.yaml to concrete specs: each value is the user's or chosen, with where it came from."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from farspan.domain.cluster import Cluster
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import ModelSpec
from farspan.domain.probe_requests import ProbeResult
from farspan.domain.train import TrainSpec
from farspan.planning.choose_model import choose_model
from farspan.planning.choose_train import choose_train, draft_training
from farspan.planning.model_speed import step_seconds
from farspan.planning.quantities import check_quantities
from farspan.semantics.compile_choice import choose_compile

#: Trains the model for a few steps on one device and says how fast, at each dtype the device has.
Measure = Callable[[ModelSpec, TrainSpec], ProbeResult]


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """Concrete specs. `origin` maps a dotted key to where its value came from: run.yaml, default,
    corpus, machine."""

    model: ModelSpec
    train: TrainSpec
    probe: ProbeResult
    warnings: tuple[str, ...]
    origin: dict[str, str]


def _is_to_compile(train: TrainSpec, cluster: Cluster, probe: ProbeResult) -> bool:
    """Return whether the first device compiles by itself in such a training."""
    if train.compile != "auto":
        return False
    workers = len(cluster.devices)
    rows = -(-train.batch // workers)
    step_s = step_seconds(rows, train.seq_len, probe.speeds[train.precision], cluster)
    host = cluster.machines[0]
    return choose_compile(host.devices[0], host.triton, train.steps * step_s).value


def resolve_config(
    config: RunConfig,
    corpus: CorpusManifest,
    cluster: Cluster,
    *,
    matmul_flops: Callable[[], float],
    measure: Measure,
) -> Settled:
    """Choose the model and the training that `config` asks for on this corpus and these devices.

    `matmul_flops` (FLOP/s of bare matrix products, all devices together) is called only for `size:
    auto`; `measure` is called once, with a draft whose `batch` is the sequences that one device
    should be tried with, and once more for compiled steps where a plan will have them. Raises
    Refusal (out-of-range with the key, corpus-too-small, tokenizer-mismatch, model-unsupported).
    """
    check_quantities(config)
    chosen = choose_model(config, corpus, cluster, matmul_flops)
    drafted = draft_training(config, chosen, len(cluster.devices))
    probe = measure(chosen.model, drafted)
    train, origin, warnings = choose_train(config, chosen, drafted, corpus, cluster, probe)
    if _is_to_compile(train, cluster, probe):
        # Plans for so long a run compile, so their speed is that of compiled steps.
        draft = replace(drafted, compile=True, precision=train.precision)
        compiled = measure(chosen.model, draft)
        if compiled.compiled:
            probe = replace(compiled, speeds={**probe.speeds, **compiled.speeds})
            train, origin, warnings = choose_train(config, chosen, drafted, corpus, cluster, probe)
    return Settled(
        model=chosen.model,
        train=train,
        probe=probe,
        warnings=chosen.warnings + warnings,
        origin=chosen.origin | origin,
    )
