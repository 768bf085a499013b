"""TensorBoard: event files in the run's folder, written by its own library, without TensorFlow and
PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.domain.own_files import refuse_link
from farspan.domain.run import RunFolder
from farspan.report.trackers import EndState, Point, TrackedRun

#: The largest float32: scalars hold no more.
_LARGEST = 3.4028234663852886e38


class TensorBoard:
    """Writes one event file for each start of a tracker."""

    note = ""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def last_steps(self) -> None:
        return None

    def rewind(self, step: int) -> bool:
        """Write a session mark, upon which TensorBoard forgets what it has read of later steps."""
        from tensorboard.compat.proto import event_pb2

        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(step=step + 1, session_log=session))
        return True

    def describe(self, config: Mapping[str, Any]) -> None:
        """Do nothing: TensorBoard has no configuration of a run."""

    def log(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        for point in points:
            summary = summary_pb2.Summary()
            for tag, value in point.values.items():
                summary.value.add(tag=tag, simple_value=_as_float32(value))
            for tag, text in point.texts.items():
                _add_text(summary, tag, text)
            event = event_pb2.Event(wall_time=point.at, step=point.step, summary=summary)
            self._writer.add_event(event)
        self._writer.flush()

    def finish(self, state: EndState, summary: Mapping[str, Any], at: float) -> None:
        self._writer.close()


def required_modules() -> tuple[str, ...]:
    return ("tensorboard",)


def open_tracker(run: TrackedRun) -> TensorBoard:
    folder = RunFolder(run.folder).tensorboard
    refuse_link(folder)
    return TensorBoard(folder)


def _as_float32(value: float) -> float:
    return value if abs(value) <= _LARGEST else math.copysign(math.inf, value)


def _add_text(summary: Any, tag: str, text: str) -> None:
    from tensorboard.compat.proto import types_pb2

    value = summary.value.add(tag=tag)
    value.metadata.plugin_data.plugin_name = "text"
    value.tensor.dtype = types_pb2.DT_STRING
    value.tensor.tensor_shape.dim.add(size=1)
    # TensorBoard shows Markdown; indented lines are shown as they are.
    lines = [f"    {line}" for line in text.splitlines()]
    value.tensor.string_val.append("\n".join(lines).encode())
