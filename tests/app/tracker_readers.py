"""Reads what a tracker has recorded, by its own library: `python tracker_readers.py NAME PATH`
prints it as JSON.

It runs in the environment that has the library, and imports nothing of farspan.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: LevelDB's log format, which .wandb files have: blocks of records, each with its checksum, length
#: and type (whole, first, middle, last), behind 7 bytes of a header.
BLOCK = 32 * 1024
RECORD_HEADER = struct.Struct("<IHB")
FILE_HEADER = 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, by the library's own messages."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position = FILE_HEADER
    record = b""
    while position + RECORD_HEADER.size <= len(content):
        room = BLOCK - position % BLOCK
        if room < RECORD_HEADER.size:
            position += room
            continue
        _, length, kind = RECORD_HEADER.unpack_from(content, position)
        position += RECORD_HEADER.size
        record += content[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            record = b""
            yield message


def read_wandb(folder: Path) -> dict[str, Any]:
    """All that the offline runs in a folder have logged, one after another."""
    runs: list[dict[str, Any]] = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        run: dict[str, Any] = {"points": [], "config": {}, "summary": {}, "exit_code": None}
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run |= {"id": record.run.run_id, "name": record.run.display_name}
                run["project"] = record.run.project
                run["config"] |= _items(record.run.config.update)
            elif kind == "config":
                run["config"] |= _items(record.config.update)
            elif kind == "summary":
                run["summary"] |= _items(record.summary.update)
            elif kind == "exit":
                run["exit_code"] = record.exit.exit_code
            elif kind == "history":
                values = _items(record.history.item)
                step = values.pop("_step")
                points = {tag: v for tag, v in values.items() if not tag.startswith("_")}
                run["points"].append([step, points])
        runs.append(run)
    return {"runs": runs}


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def read_mlflow(database: Path) -> dict[str, Any]:
    """All that the runs in a database have logged."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("farspan")
    runs = []
    for run in client.search_runs([experiment.experiment_id]):
        metrics = {}
        for tag in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, tag)
            metrics[tag] = [[metric.step, metric.value, metric.timestamp] for metric in history]
        runs.append(
            {
                "name": run.info.run_name,
                "status": run.info.status,
                "metrics": metrics,
                "params": run.data.params,
                "tags": run.data.tags,
            }
        )
    return {"runs": runs}


if __name__ == "__main__":
    readers = {"wandb": read_wandb, "mlflow": read_mlflow}
    print(json.dumps(readers[sys.argv[1]](Path(sys.argv[2]))))
