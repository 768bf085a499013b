"""What a bench tries before it predicts: every model for a few steps on one device, as `farspan
train` does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from farspan.app.clusters import first_device
from farspan.app.resolving import PROBE_S
from farspan.domain.cluster import Cluster
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.probe_requests import ProbeResult
from farspan.domain.problems import Problem, Refusal
from farspan.domain.struct_files import content_hash, load, save
from farspan.domain.train import TrainSpec
from farspan.launch.probe_client import Probe
from farspan.planning import model_speed
from farspan_studies.bench.cases import Case, seq_len_of, spec_of
from farspan_studies.bench.clusters import There
from farspan_studies.bench.matrix import Cell, Matrix

#: What a trial takes with the start of its process: for the time that is said before.
TRIAL_S = 12.0


class DeviceTrial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trial of a model on a cluster's first device, or why there is none: then nothing corrects
    its predictions."""

    probe: ProbeResult | None = None
    why: str = ""


class TriedPaces:
    """The clusters of a matrix as trials found their first devices. A trial is made once and kept
    in `folder`, so that a matrix that goes on is priced as it was begun."""

    def __init__(self, folder: Path, matrix: Matrix, clusters: There) -> None:
        self._folder = folder
        self._matrix = matrix
        self._there = clusters
        self._known: dict[Path, DeviceTrial] = {}

    def cluster(self, cell: Cell) -> Cluster:
        """Return the cell's cluster, with the pace and the memory of its model's trial where there
        is one."""
        plain = self._there[cell.cluster][0]
        model = spec_of(self._matrix.models[cell.model])
        train = TrainSpec(
            steps=1,
            batch=cell.batch,
            seq_len=seq_len_of(cell, model),
            precision=cell.precision,
            attention=cell.attention,
        )
        return _as_found(plain, self._tried(self._path(cell, model)), model, train)

    def missing(self, cases: Iterable[Case], *, retry: bool) -> dict[Path, Case]:
        """Return the first case of every trial that is yet to be made, with `retry` also of those
        that failed, by the trial's file."""
        untried: dict[Path, Case] = {}
        for case in cases:
            path = self._path(case.cell, case.model)
            known = self._tried(path)
            if not isinstance(case.made, Problem) and (
                known is None or (retry and known.probe is None)
            ):
                untried.setdefault(path, case)
        return untried

    def make(self, cases: Mapping[Path, Case], say: Callable[[str], None]) -> None:
        """Try every case that is missing."""
        for path, case in cases.items():
            plain = self._there[case.cell.cluster][0]
            kind = plain.devices[0].kind
            say(
                f"trying {case.cell.model} on one {kind} of {case.cell.cluster}: "
                f"{case.cell.precision}"
            )
            trial = self._known[path] = tried(case, plain)
            if trial.probe is None:
                say(f"it cannot be tried there and is predicted alone: {trial.why}")
            path.parent.mkdir(parents=True, exist_ok=True)
            save(trial, path)

    def _path(self, cell: Cell, model: ModelSpec) -> Path:
        """Return the file of the trial that a cell is priced by: batch, technique and devices are
        not its own."""
        hash_ = self._there[cell.cluster][1]
        return trial_file(
            self._folder, hash_, model, cell.precision, seq_len_of(cell, model), cell.attention
        )

    def _tried(self, path: Path) -> DeviceTrial | None:
        if path not in self._known and path.exists():
            self._known[path] = load(path, DeviceTrial)
        return self._known.get(path)


def trial_file(folder: Path, cluster_hash: str, model: ModelSpec, *more: object) -> Path:
    """Return the file of a trial of a model at a precision, length of sequences and attention."""
    return folder / f"{content_hash(model, cluster_hash, *more)}.json"


def _as_found(
    plain: Cluster, trial: DeviceTrial | None, model: ModelSpec, train: TrainSpec
) -> Cluster:
    """Return the cluster as the trial found its first device; as it is where there is none."""
    if trial is None or trial.probe is None:
        return plain
    return model_speed.calibrate_cluster(plain, model, train, load_engine("farspan"), trial.probe)


def as_tried(folder: Path, plain: Cluster, cluster_hash: str, plan: Plan) -> Cluster:
    """Return the cluster as a plan of a bench was priced on it, whose trials lie in `folder`."""
    train = plan.train
    path = trial_file(
        folder, cluster_hash, plan.model, train.precision, train.seq_len, train.attention
    )
    return _as_found(plain, load(path, DeviceTrial) if path.exists() else None, plan.model, train)


def tried(case: Case, plain: Cluster) -> DeviceTrial:
    """Return a few steps of a case's model on the first device, of as many of its sequences as fit
    there."""
    wanted = msgspec.structs.replace(case.train, batch=case.cell.batch, steps=1)
    train = model_speed.fit_batch(case.model, wanted, plain, load_engine("farspan"))
    at = first_device(plain)
    if isinstance(train, Problem):
        return DeviceTrial(why=f"{train.what}: {train.fact}")
    try:
        with Probe(plain.machines[0], threads=at.threads, device=0) as probe:
            return DeviceTrial(
                probe=probe.measure_step(
                    at, case.model, train, precisions=(train.precision,), seconds=PROBE_S
                )
            )
    except Refusal as refusal:
        return DeviceTrial(why=f"{refusal.problem.what}: {refusal.problem.fact}")
    except (OSError, subprocess.SubprocessError) as error:
        return DeviceTrial(why=str(error))
