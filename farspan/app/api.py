"""The Python API: a function for each thing that a user does, and `Run`, a training's folder.

`progress` is called with every update (`farspan.app.updates`); `print` shows a line for each.
Without it IPython shows a bar. What cannot be done raises `farspan.Refusal`, whose `problem` states
what, where, why and what mends it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from farspan.app import (
    clusters,
    estimate_given_plan,
    examine_machines,
    indexing,
    jobs,
    predictions,
    reporting,
    resolving,
    training,
)
from farspan.app.choose_plan import choose_plan as choose_by_trials
from farspan.app.configs import default_name, make_config
from farspan.app.index_folders import make_index_folder
from farspan.app.model_use import Format, export_model, generate_text
from farspan.app.notebook_bar import show_progress
from farspan.app.plans import read_planned
from farspan.app.preflight_checks import refuse_existing
from farspan.app.reporting import Report
from farspan.app.updates import Progress, note_reporter
from farspan.domain.cluster import Cluster
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.index_folder import IndexFolder
from farspan.domain.model import WeightType
from farspan.domain.objective import Objective
from farspan.domain.problems import command
from farspan.domain.run import RunFolder
from farspan.planning.plan_question import Question
from farspan.planning.ranking import Ranking
from farspan.planning.select_by_trials import Selection

if TYPE_CHECKING:
    from farspan.app.examine_machines import Diagnosis
    from farspan.app.indexing import Indexed
    from farspan.report.compare import Versus
    from farspan.retrieval.hybrid_ranking import System
    from farspan.retrieval.search import Answer

#: A folder or name of text, a run.yaml, or a config.
Data = str | os.PathLike[str] | RunConfig


class Run:
    """A run that was started: its folder, and what can be done with it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = RunFolder.existing(Path(path))

    @property
    def path(self) -> Path:
        return self.folder.path

    def report(self) -> Report:
        """Return the measured figures next to the predicted ones; `str()` of the report is its
        text, and its `page` opens in a browser."""
        return reporting.write_report(self.path)

    def resume(
        self,
        progress: Progress | None = None,
        *,
        trust: bool = False,
        cluster: str | None = None,
        technique: str | None = None,
        without: tuple[str, ...] = (),
    ) -> Report:
        """Continue from the newest whole checkpoint; a finished run is only reported. For another
        cluster (`here` is this machine) or technique the remaining steps are planned again. The
        sites in `without` are given up."""
        with show_progress(progress) as shown:
            return training.resume_run(
                self.folder,
                shown,
                trust=trust,
                cluster=cluster,
                technique=technique,
                without=without,
            )

    def status(self) -> jobs.Status:
        """Return whether the run is active or how it ended, how far it is, and what is saved."""
        return jobs.read_status(self.folder)

    def stop(
        self,
        progress: Progress | None = None,
        *,
        now: bool = False,
        timeout_s: float = jobs.STOP_TIMEOUT_S,
    ) -> jobs.Status:
        """Ask the process that trains the run to save and end, or with `now` to end at once, and
        wait until it has."""
        with show_progress(progress) as shown:
            return jobs.stop_job(self.folder, note_reporter(shown), now=now, timeout_s=timeout_s)

    def history(self) -> list[dict[str, float | int | None]]:
        """Return a record of each step, oldest first, for `pandas.DataFrame`: step, time_s, tokens,
        loss, lr, grad_norm, tokens_per_s, memory_bytes; and val_loss and val_bits_per_byte of the
        steps after which the run was validated, else None."""
        return reporting.history_records(self.path)

    def plot(self, chart: str = "loss-tokens") -> reporting.ChartPicture:
        """Draw a chart of the report, which notebooks show: loss-tokens, loss-time, speed, memory,
        lr or grad-norm. `save(path)` writes it as SVG. Raises Refusal (usage) for another name."""
        return reporting.draw_chart(self.path, chart)

    def embed(
        self,
        progress: Progress | None = None,
        *,
        evaluate: bool = True,
        store: str | None = None,
        encoder: str | None = None,
        device: indexing.Device = "auto",
        processes: int = 1,
    ) -> Indexed:
        """Bring the run's index to the documents that its text holds today; the first time, fit
        vectors and measure how well they find documents. `store` and `encoder` are as run.yaml's
        `index.store` and `index.encoder` name them."""
        with show_progress(progress) as shown:
            return indexing.update_index(
                self.folder,
                shown,
                evaluate=evaluate,
                store=store,
                encoder=encoder,
                device=device,
                processes=processes,
            )

    def tune(
        self,
        progress: Progress | None = None,
        *,
        queries: str | os.PathLike[str] | None = None,
        qrels: str | os.PathLike[str] | None = None,
        store: str | None = None,
        encoder: str | None = None,
        device: indexing.Device = "auto",
        processes: int = 1,
    ) -> Indexed:
        """Fit the vectors of the run's index again to the text of today, and measure how well they
        find documents: for titles, openings and questions of the text, and for `queries` with their
        `qrels` (`retrieval/relevance_judgements.py`)."""
        with show_progress(progress) as shown:
            return indexing.update_index(
                self.folder,
                shown,
                store=store,
                encoder=encoder,
                device=device,
                processes=processes,
                tune=True,
                queries=_optional_path(queries),
                qrels=_optional_path(qrels),
            )

    def search(
        self,
        query: str,
        k: int = 5,
        system: System | None = None,
        progress: Progress | None = None,
        where: Mapping[str, Any] | Sequence[str] | None = None,
    ) -> Answer:
        """Return the documents that answer a query best, of those with the values of `where` in
        their fields. The first search makes the index where there is none, which takes minutes:
        `progress` shows how far it is."""
        with show_progress(progress) as shown:
            if not (self.folder.index / "index.json").exists():
                note_reporter(shown)("there is no index yet: embedding the run's documents")
                self.embed(shown)
            return indexing.search_home(self.folder, query, k, system, where, shown)

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
    ) -> str:
        """Return text that the model writes after a prompt."""
        return generate_text(
            self.folder, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )[0]

    def export(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        dtype: WeightType | None = None,
        format: Format = "huggingface",
        push: str | None = None,
        public: bool = False,
    ) -> Path:
        """Write the model as a folder that transformers loads, the embedder of its index as one
        that sentence-transformers loads, or the model as a file that llama.cpp loads. `push` is the
        repository of the Hugging Face hub to upload the folder to, private unless `public`."""
        exported = export_model(
            self.folder, _optional_path(out), dtype=dtype, format=format, push=push, public=public
        )
        return exported.path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


class SearchIndex:
    """The index of a text that nothing was trained on: its folder, and searches."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = IndexFolder(Path(path))

    @property
    def path(self) -> Path:
        return self.folder.path

    def update(
        self,
        progress: Progress | None = None,
        *,
        evaluate: bool = True,
        refit: bool = False,
        queries: str | os.PathLike[str] | None = None,
        qrels: str | os.PathLike[str] | None = None,
    ) -> Indexed:
        """Bring the index to the documents that its text holds today; with `refit` choose again how
        it answers, also by `queries` with their `qrels` (`retrieval/relevance_judgements.py`)."""
        with show_progress(progress) as shown:
            return indexing.update_index(
                self.folder,
                shown,
                evaluate=evaluate,
                tune=refit,
                queries=_optional_path(queries),
                qrels=_optional_path(qrels),
            )

    def search(
        self,
        query: str,
        k: int = 5,
        system: System | None = None,
        progress: Progress | None = None,
        where: Mapping[str, Any] | Sequence[str] | None = None,
    ) -> Answer:
        """Return the documents that answer a query best, of those with the values of `where` in
        their fields."""
        with show_progress(progress) as shown:
            return indexing.search_home(self.folder, query, k, system, where, shown)

    def __repr__(self) -> str:
        return f"SearchIndex({str(self.path)!r})"


def index(
    source: str | os.PathLike[str],
    into: str | os.PathLike[str] | None = None,
    *,
    encoder: str | None = None,
    store: str | None = None,
    evaluate: bool = True,
    progress: Progress | None = None,
) -> SearchIndex:
    """Make a folder or file of text searchable, without training: by words, and by vectors of a
    ready encoder where there is one. The index lies in `into`, or `indexes/NAME`."""
    folder = make_index_folder(
        os.fspath(source), _optional_path(into), encoder=encoder, store=store
    )
    made = SearchIndex(folder.path)
    made.update(progress, evaluate=evaluate)
    return made


def _optional_path(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)


def prepare(
    data: Data, progress: Progress | None = None, **keys: Any
) -> tuple[Path, CorpusManifest]:
    """Make the tokenizer and token files of a text, or find them made. `keys` are those of
    run.yaml."""
    with show_progress(progress) as shown:
        return resolving.prepare_run_corpus(make_config(data, **keys), shown, verified=True)


def plan(
    model: str,
    cluster: str,
    *,
    allow: tuple[str, ...] = (),
    objective: Objective = "time",
    **training: Any,
) -> Ranking:
    """Price each technique for a model on a cluster; `training` is of
    `planning.plan_question.Question`: tokens, batch, seq_len, precision, attention, recompute,
    wan_bits."""
    question = Question(model=model, **training)
    query = predictions.PlanQuery(
        question=question, cluster=cluster, allow=allow, objective=objective
    )
    return predictions.price_model(query)


def price(
    plan: estimate_given_plan.Given,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    engine: str | None = None,
    progress: Progress | None = None,
) -> estimate_given_plan.PricedPlan:
    """Price one plan: a file, its table in short form, or a Plan. Without a cluster it is this
    machine's; the engine is the plan's own unless another is named."""
    with show_progress(progress) as shown:
        return estimate_given_plan.price_given(plan, cluster, engine, shown)


def select(
    data: Data, progress: Progress | None = None, *, budget_s: float | None = None, **keys: Any
) -> Selection:
    """Choose the best plan for a text by trials; no trial begins after `budget_s` seconds."""
    config = make_config(data, **keys)
    with show_progress(progress) as shown:
        resolved = resolving.resolve_run(config, shown, trial=True)
        return choose_by_trials(resolved, config.parallel, shown, paying=False, budget_s=budget_s)


def train(
    data: Data,
    *,
    run: str | os.PathLike[str] | None = None,
    plan: str | os.PathLike[str] | Selection | None = None,
    progress: Progress | None = None,
    **keys: Any,
) -> Run:
    """Plan, pretrain and report: `train("papers", budget="10m")`.

    `run` is the folder to make (by default runs/NAME), `plan` a file of `farspan plan -o` or what
    `select` gave, and `keys` are those of run.yaml. An interrupted run raises Refusal
    (interrupted); `Run(path).resume()` continues it.
    """
    config = make_config(data, **keys)
    path = Path(run) if run else Path("runs") / default_name(config)
    refuse_existing(path, f"name another folder, or go on: {command('resume', path)}")
    with show_progress(progress) as shown:
        if plan is None:
            folder = training.plan_run(path, config, shown)
        else:
            given = plan if isinstance(plan, Selection) else Path(plan)
            source = Path("run.yaml" if isinstance(data, RunConfig) else data)
            planned = read_planned(given, config, source, shown)
            folder = training.make_run(path, config, planned, shown)
        training.train_new(folder, shown)
    return Run(path)


def train_until_done(
    config: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    without: tuple[str, ...] = (),
) -> Run:
    """Train the run of a run.yaml to its end: begin it, resume it, or restore it from a copy. Hosts
    that are away are waited for; the sites in `without` are given up."""
    path = Path(config)
    asked = make_config(path)
    folder = Path(run) if run else Path("runs") / default_name(asked)
    with show_progress(progress) as shown:
        training.train_until_done(folder, asked, path, shown, without=without)
    return Run(folder)


def compare(*runs: str | os.PathLike[str] | Run) -> Versus:
    """Compare two runs or more: what was configured differently, and what came out."""
    return reporting.compare_runs([run.path if isinstance(run, Run) else Path(run) for run in runs])


def find_cluster(name: str) -> Cluster:
    """Return the cluster of a file, or of a name that `farspan cluster list` knows."""
    return clusters.find_cluster(name)


def probe(
    cluster: str,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    model: str = "gpt2",
    seq_len: int | None = None,
) -> Cluster:
    """Measure a cluster, and write the measured figures as a cluster file."""
    with show_progress(progress) as shown:
        return examine_machines.probe_cluster(
            cluster, Path(out), shown, model=model, seq_len=seq_len
        )


def doctor(device: Literal["auto", "cpu", "cuda", "mps"] = "auto") -> Diagnosis:
    """Diagnose this machine: its devices, what is missing, and the command that mends each."""
    return examine_machines.diagnose_machine(device)
