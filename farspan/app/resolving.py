"""run.yaml made concrete: its text prepared, its cluster found, its model and training settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from farspan.app.checks import check_gpus, require_torch
from farspan.app.clusters import first_device, given_cluster
from farspan.app.updates import Note, Progress, notes, silent
from farspan.domain.cluster import Cluster
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import ModelSpec
from farspan.domain.probe import ProbeResult
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import make_cache_folder
from farspan.domain.train import TrainSpec

if TYPE_CHECKING:
    from farspan.launch.probe import Probe
    from farspan.planning.resolve import Measure

#: Seconds of trial steps in each precision.
PROBE_S = 3.0


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """run.yaml made concrete on a cluster whose devices keep the pace of a trial, or of the
    estimator."""

    model: ModelSpec
    train: TrainSpec
    cluster: Cluster
    corpus: CorpusManifest
    corpus_folder: Path
    warnings: tuple[str, ...]
    #: Where each value came from, by its dotted key.
    origin: dict[str, str]

    @property
    def values(self) -> dict[str, tuple[Any, str]]:
        """Dotted key -> value and origin, for every value that was chosen or given."""
        parts = {"model": msgspec.to_builtins(self.model), "train": msgspec.to_builtins(self.train)}
        optimizer = parts["train"].pop("optimizer")
        muon = optimizer.pop("muon", {})
        optimizer = {"optimizer": "muon" if muon else "adamw", **optimizer}
        optimizer |= {"embedding": muon["embedding"]} if muon else {}
        parts["train"].update(
            optimizer, **parts["train"].pop("schedule"), **msgspec.to_builtins(self.train.regular)
        )
        parts["train"].pop("regularization", None)
        return {
            f"{part}.{key}": (
                value,
                self.origin.get(f"{part}.{key}", self.origin.get(part, "default")),
            )
            for part, fields in parts.items()
            for key, value in fields.items()
        }


def prepare(
    config: RunConfig, progress: Progress = silent, *, verified: bool = False
) -> tuple[Path, CorpusManifest]:
    """Tokenizer and token files of the run's text, made or found: their folder and what is in it.
    With `verified` all of what is found is read, and made again where it is damaged."""
    from farspan.corpus.prepare import prepare as prepare_corpus
    from farspan.corpus.processes import usable_cores
    from farspan.planning.quantities import check

    check(config)
    folder, manifest = prepare_corpus(
        config.data_config,
        config.tokenizer_config,
        make_cache_folder("corpora"),
        workers=usable_cores(),
        say=notes(progress),
        verified=verified,
    )
    for kinds in manifest.skipped_kinds:
        progress(Note(f"skipped {kinds}"))
    for kinds in manifest.recoded_kinds:
        progress(Note(kinds))
    return folder, manifest


def resolve(config: RunConfig, progress: Progress = silent, *, trial: bool) -> Resolved:
    """Prepare the text, find the cluster, and settle model and training; with `trial` on the first
    device's real speed.

    Without a trial nothing of the cluster is touched: its figures and the estimator stand for it.
    """
    from farspan.domain.engine import engine as find_engine
    from farspan.planning import model_speed
    from farspan.planning.resolve import resolve as resolve_config
    from farspan.retrieval.stores import resolve as resolve_store

    resolve_store(config.index.store)
    allowed(config.parallel)
    engine = find_engine("farspan")
    given = given_cluster(config, reach=trial)
    left_out = check_gpus(config) if given is None else ()
    folder, manifest = prepare(config, progress)
    if trial or given is None:
        with _prober(config, given) as (probe, cluster):
            settled = resolve_config(
                config, manifest, cluster, **_trials(config, probe, cluster, progress)
            )
        cluster = model_speed.calibrated(
            cluster, settled.model, settled.train, engine, settled.probe
        )
    else:
        cluster = given
        precisions = (
            model_speed.common_precisions(cluster)
            if config.train.precision == "auto"
            else (config.train.precision,)
        )
        settled = resolve_config(
            config,
            manifest,
            cluster,
            matmul_flops=lambda: model_speed.product_flops(cluster, engine, precisions),
            measure=lambda model, train: model_speed.predicted(
                model, train, cluster, engine, precisions
            ),
        )
    return Resolved(
        model=settled.model,
        train=settled.train,
        cluster=cluster,
        corpus=manifest,
        corpus_folder=folder,
        warnings=(*left_out, *settled.warnings),
        origin=settled.origin,
    )


def tried_here(
    config: RunConfig,
    asked: Callable[[Cluster], tuple[ModelSpec, TrainSpec]],
    progress: Progress = silent,
) -> Cluster:
    """This machine as a cluster, whose devices keep the pace of a trial of the model and the
    training that `asked` means on it, as for a run.yaml without a cluster."""
    from farspan.domain.engine import engine as find_engine
    from farspan.planning import model_speed

    engine = find_engine("farspan")
    for note in check_gpus(config):
        progress(Note(note))
    with _prober(config, None) as (probe, cluster):
        model, train = asked(cluster)
        only = msgspec.structs.replace(
            config, train=msgspec.structs.replace(config.train, precision=train.precision)
        )
        measured = _trials(only, probe, cluster, progress)["measure"](model, train)
    return model_speed.calibrated(cluster, model, train, engine, measured)


def allowed(parallel: ParallelConfig) -> tuple[str, ...]:
    """The techniques that run.yaml lets one compare; none is all. Refuses names that are none."""
    from farspan import techniques

    if parallel.technique != "auto":
        techniques.technique(parallel.technique)
        return (parallel.technique,)
    for name in parallel.allow:
        techniques.technique(name, "parallel.allow")
    return parallel.allow


@contextmanager
def _prober(config: RunConfig, given: Cluster | None) -> Iterator[tuple[Probe, Cluster]]:
    """A probe process on the first host, and the cluster: the given one, or what the process finds
    here."""
    from farspan.launch.probe import Probe

    require_torch()
    with (
        Probe(given.machines[0], threads=given.devices[0].slot.threads, device=0)
        if given
        else Probe() as probe
    ):
        workers = config.parallel.workers
        yield (
            probe,
            given or probe.describe(config.parallel.device, None if workers == "auto" else workers),
        )


class _Trials(TypedDict):
    matmul_flops: Callable[[], float]
    measure: Measure


def _trials(config: RunConfig, probe: Probe, cluster: Cluster, progress: Progress) -> _Trials:
    """The two measurements that resolving asks for, made on the cluster's first device."""
    from farspan.domain.engine import engine
    from farspan.planning import model_speed

    device = first_device(cluster)
    kind = cluster.devices[0].kind
    precisions = (
        cluster.devices[0].sheet.precisions
        if config.train.precision == "auto"
        else (config.train.precision,)
    )

    def matmul_flops() -> float:
        return (
            len(cluster.devices)
            / model_speed.crowding(cluster)
            * max(probe.matmul_flops(device, precisions).values())
        )

    def measure(model: ModelSpec, train: TrainSpec) -> ProbeResult:
        fitting = model_speed.fitting(model, train, cluster, engine("farspan"))
        if isinstance(fitting, Problem) and len(cluster.devices) == 1:
            raise Refusal.of(fitting)
        if isinstance(
            fitting, Problem
        ):  # A model that one device cannot hold may still be divided over several.
            progress(Note(f"the model is not tried on one {kind}, which cannot hold it: predicted"))
            return model_speed.predicted(model, train, cluster, engine("farspan"), precisions)
        progress(Note(f"trying the model on {kind}: {', '.join(precisions)}"))
        return probe.measure(device, model, fitting, precisions=precisions, seconds=PROBE_S)

    return {"matmul_flops": matmul_flops, "measure": measure}
