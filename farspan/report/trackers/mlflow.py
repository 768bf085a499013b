"""MLflow, by the client of `mlflow-skinny`: at MLFLOW_TRACKING_URI, or else in a SQLite database
next to the run's folder, which all runs there share.

No text, path or name of a host is sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from farspan.report.trackers import EndState, Point, TrackedRun

DEFAULT_EXPERIMENT = "farspan"
DATABASE = "mlflow.db"
#: The tag by which a resumed run is found.
ID_TAG = "farspan.run"
#: The server's limits on one request, and on a value of a parameter.
MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_VALUE = 500
#: The library asks a server that does not answer for minutes, and counts its users. Variables that
#: are set stay as they are.
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflowRun:
    """A run of an MLflow experiment."""

    note = ""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def last_steps(self) -> dict[str, int]:
        last = {}
        for kind in ("train", "val"):
            history = self._client.get_metric_history(self._run_id, f"{kind}/loss")
            last[kind] = max((metric.step for metric in history), default=-1)
        return last

    def rewind(self, step: int) -> bool:
        return False

    def describe(self, config: Mapping[str, Any]) -> None:
        """Log the parameters. One that was logged with another value cannot be changed: the new
        value is a tag."""
        from mlflow.entities import Param, RunTag

        logged = self._client.get_run(self._run_id).data.params
        values = {key: str(value)[:MAX_VALUE] for key, value in config.items()}
        params = [Param(key, value) for key, value in values.items() if key not in logged]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        tags = [
            RunTag(key, value) for key, value in values.items() if logged.get(key, value) != value
        ]
        self._client.log_batch(self._run_id, tags=tags)

    def log(self, points: Sequence[Point]) -> None:
        """Log the values; text that the model wrote stays here."""
        from mlflow.entities import Metric

        metrics = []
        for point in points:
            at_ms = int(point.at * 1000)
            for tag, value in point.values.items():
                metrics.append(Metric(tag, value, at_ms, point.step))
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])

    def finish(self, state: EndState, summary: Mapping[str, Any], at: float) -> None:
        """Record the summary: numbers as metrics, by which runs are compared, the rest as tags."""
        from mlflow.entities import Metric, RunTag

        metrics = []
        tags = [RunTag("state", state)]
        for key, value in summary.items():
            if isinstance(value, str):
                tags.append(RunTag(key, value))
            else:
                metrics.append(Metric(f"summary/{key}", float(value), int(at * 1000), 0))
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)
        self._client.set_terminated(self._run_id, STATUSES[state])


def required_modules() -> tuple[str, ...]:
    # The last two are what its SQLite store needs.
    return ("mlflow", "sqlalchemy", "alembic")


def open_tracker(run: TrackedRun) -> MLflowRun:
    for variable, value in VARIABLES.items():
        os.environ.setdefault(variable, value)
    from mlflow import MlflowClient

    runs_folder = run.folder.absolute().parent
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    artifacts = None
    if uri is None:
        uri = f"sqlite:///{runs_folder / DATABASE}"
        # By default it would be in the current folder.
        artifacts = (runs_folder / "mlruns").as_uri()
    client = MlflowClient(tracking_uri=uri)
    experiment = _find_experiment(client, artifacts)
    run_id = _find_run(client, experiment, run)
    tracker = MLflowRun(client, run_id)
    tracker.describe(run.config)
    return tracker


def _find_experiment(client: Any, artifacts: str | None) -> str:
    """Return the id of the experiment, which is made where there is none."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    return str(experiment.experiment_id)


def _find_run(client: Any, experiment: str, run: TrackedRun) -> str:
    """Return the id that MLflow has given the run, and let it run again; begin it where there is
    none."""
    begun = client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
    if not begun:
        created = client.create_run(experiment, run_name=run.name, tags={ID_TAG: run.id})
        return str(created.info.run_id)
    run_id = str(begun[0].info.run_id)
    client.update_run(run_id, status="RUNNING")
    return run_id
