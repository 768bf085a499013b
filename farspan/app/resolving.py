"""run.yaml made concrete: its text prepared, its cluster found, its model and training settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
from msgspec.structs import replace

from farspan.app.clusters import first_device, given_cluster
from farspan.app.preflight_checks import check_gpus, require_torch
from farspan.app.updates import Note, Progress, ignore_update, note_reporter
from farspan.corpus.hub_models import find_model_folder
from farspan.domain.cluster import Cluster
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.engine import load_engine as find_engine
from farspan.domain.model import ModelSpec
from farspan.domain.probe_requests import ProbeResult
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import make_cache_folder
from farspan.domain.train import TrainSpec
from farspan.models._base_files import has_chat_template

if TYPE_CHECKING:
    from farspan.launch.probe_client import Probe
    from farspan.planning.resolve import Measure

#: Seconds of trial steps in each precision.
PROBE_S = 3.0
CHAT_NOTE = (
    "the model has a chat template, so it was trained to follow instructions: plain text makes it "
    "forget them. To restore that, train the exported folder on chats: docs/models.md, Chat "
    "templates"
)


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
        """Dotted key -> value and origin, for every value that was chosen or given; `auto` where
        plans choose for their devices."""
        train = msgspec.to_builtins(self.train)
        optimizer = train.pop("optimizer")
        schedule = train.pop("schedule")
        train.pop("regularization", None)
        muon = optimizer.pop("muon", {})
        train.setdefault("graph", False)
        train["optimizer"] = "muon" if muon else "adamw"
        train |= optimizer
        if muon:
            train["embedding"] = muon["embedding"]
        train |= schedule
        train |= msgspec.to_builtins(self.train.regular)
        values = {}
        for part, fields in (("model", msgspec.to_builtins(self.model)), ("train", train)):
            part_origin = self.origin.get(part, "default")
            for name, value in fields.items():
                key = f"{part}.{name}"
                values[key] = (value, self.origin.get(key, part_origin))
        return values


def prepare_run_corpus(
    config: RunConfig, progress: Progress = ignore_update, *, verified: bool = False
) -> tuple[Path, CorpusManifest]:
    """Make or find the tokenizer and token files of the run's text: their folder and manifest.

    With `verified` all that was made before is read, and made again where it is damaged.
    """
    from farspan.corpus.prepare import prepare_corpus as prepare_corpus
    from farspan.corpus.processes import usable_cores
    from farspan.planning.quantities import check_quantities

    check_quantities(config)
    folder, manifest = prepare_corpus(
        config.data_config,
        config.tokenizer_config,
        make_cache_folder("corpora"),
        workers=usable_cores(),
        write_line=note_reporter(progress),
        verified=verified,
    )
    for kinds in manifest.skipped_kinds:
        progress(Note(f"skipped {kinds}"))
    for kinds in manifest.recoded_kinds:
        progress(Note(kinds))
    return folder, manifest


def resolve_run(config: RunConfig, progress: Progress = ignore_update, *, trial: bool) -> Resolved:
    """Prepare the text, find the cluster, and settle model and training; with `trial` on the first
    device's real speed.

    Without a trial nothing of the cluster is touched: its figures and the estimator stand for it.
    """
    from farspan.planning import model_speed
    from farspan.planning.resolve import resolve_config as resolve_config
    from farspan.report.trackers import require_trackers
    from farspan.retrieval.stores import resolve as resolve_store

    resolve_store(config.index.store)
    require_trackers(config.train.trackers)
    allowed_techniques(config.parallel)
    engine = find_engine("farspan")
    given = given_cluster(config, reach=trial)
    gpu_notes = check_gpus(config) if given is None else ()
    folder, manifest = prepare_run_corpus(config, progress)
    if trial or given is None:
        with start_probe(config, given) as (probe, cluster):
            measures = _trial_measures(config, probe, cluster, progress)
            settled = resolve_config(config, manifest, cluster, **measures)
        cluster = model_speed.calibrate_cluster(
            cluster, settled.model, settled.train, engine, settled.probe
        )
    else:
        cluster = given
        precision = config.train.precision
        precisions = model_speed.common_precisions(cluster) if precision == "auto" else (precision,)
        settled = resolve_config(
            config,
            manifest,
            cluster,
            matmul_flops=lambda: model_speed.product_flops(cluster, engine, precisions),
            measure=lambda model, train: model_speed.predict_probe(
                model, train, cluster, engine, precisions
            ),
        )
    if config.model.path is not None and has_chat_template(find_model_folder(config.model.path)):
        progress(Note(CHAT_NOTE))
    return Resolved(
        model=settled.model,
        train=settled.train,
        cluster=cluster,
        corpus=manifest,
        corpus_folder=folder,
        warnings=(*gpu_notes, *settled.warnings),
        origin=settled.origin,
    )


def calibrate_here(
    config: RunConfig,
    asked: Callable[[Cluster], tuple[ModelSpec, TrainSpec]],
    progress: Progress = ignore_update,
) -> Cluster:
    """Return this machine as a cluster, as fast as a trial of the model and the training that
    `asked` means on it, as for a run.yaml without a cluster."""
    from farspan.planning import model_speed

    engine = find_engine("farspan")
    for note in check_gpus(config):
        progress(Note(note))
    with start_probe(config, None) as (probe, cluster):
        model, train = asked(cluster)
        in_precision = replace(config.train, precision=train.precision)
        config = replace(config, train=in_precision)
        measures = _trial_measures(config, probe, cluster, progress)
        measured = measures["measure"](model, train)
    return model_speed.calibrate_cluster(cluster, model, train, engine, measured)


def allowed_techniques(parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the techniques that run.yaml allows; none is all. Refuses names that are none."""
    from farspan import techniques

    if parallel.technique != "auto":
        techniques.technique(parallel.technique)
        return (parallel.technique,)
    for name in parallel.allow:
        techniques.technique(name, "parallel.allow")
    return parallel.allow


@contextmanager
def start_probe(config: RunConfig, given: Cluster | None) -> Iterator[tuple[Probe, Cluster]]:
    """Start a probe process on the first host; yield it and the cluster: the given one, or the
    devices that the process detects here."""
    from farspan.launch.probe_client import Probe

    require_torch()
    if given is not None:
        threads = given.devices[0].slot.threads
        with Probe(given.machines[0], threads=threads, device=0) as probe:
            yield probe, given
        return
    workers = config.parallel.workers
    limit = None if workers == "auto" else workers
    with Probe() as probe:
        yield probe, probe.describe_devices(config.parallel.device, limit)


class _TrialMeasures(TypedDict):
    matmul_flops: Callable[[], float]
    measure: Measure


def _trial_measures(
    config: RunConfig, probe: Probe, cluster: Cluster, progress: Progress
) -> _TrialMeasures:
    """Return the two measurements that resolving needs, made on the cluster's first device."""
    from farspan.planning import model_speed

    device = first_device(cluster)
    kind = device.kind
    precision = config.train.precision
    precisions = cluster.devices[0].sheet.precisions if precision == "auto" else (precision,)

    def matmul_flops() -> float:
        fastest = max(probe.matmul_flops(device, precisions).values())
        return len(cluster.devices) / model_speed.threads_per_core(cluster) * fastest

    def measure(model: ModelSpec, train: TrainSpec) -> ProbeResult:
        fitting = model_speed.fit_batch(model, train, cluster, find_engine("farspan"))
        if isinstance(fitting, Problem):
            if len(cluster.devices) == 1:
                raise Refusal.of(fitting)
            # A model that one device cannot hold may still be divided over several.
            progress(Note(f"the model is not tried on one {kind}, which cannot hold it: predicted"))
            return model_speed.predict_probe(
                model, train, cluster, find_engine("farspan"), precisions
            )
        tried = precisions
        how = ""
        if train.compile is True:
            how = ", compiled"
            if config.train.compile == "auto":
                # The others were tried before, and each would take a compile.
                tried = (train.precision,)
        progress(Note(f"trying the model on {kind}: {', '.join(tried)}{how}"))
        return probe.measure_step(device, model, fitting, precisions=tried, seconds=PROBE_S)

    return {"matmul_flops": matmul_flops, "measure": measure}
