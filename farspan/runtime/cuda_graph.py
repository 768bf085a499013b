"""Recording what a function launches as one CUDA graph (PyTorch, "CUDA semantics", "CUDA Graphs").

A small model's step is some hundreds of kernels of microseconds each, and the host takes 20
microseconds to launch one. Recorded, they are launched together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

#: Calls before the recorded one: libraries choose their kernels and take their memory in the first
#: ones, which a recording may not.
WARMUP_CALLS = 3
#: A recorded call must change each tensor as a plain one does, up to this share of the change:
#: what sums of another order could differ by, and far less than any error.
CHANGE_TOLERANCE = 0.01

Call = Callable[[], None]
#: Takes a function, and returns what launches its work again.
Recorder = Callable[[Call], Call]


class CudaRecorder:
    """Records on a stream of its own: a recording takes no part of another stream's work."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def __call__(self, function: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        # Other threads read and save: they may take memory during the recording.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            function()
        return graph.replay


#: By kind of device. Others call the function each time.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


class GraphedCalls:
    """Calls a function of static tensors, after some calls as a graph. Where recording fails, or
    the graph does not do what the function does, it calls the function each time."""

    def __init__(
        self,
        function: Call,
        changed: Sequence[Tensor],
        on_restored: Call,
        device: torch.device,
        on_failure: Callable[[str], None],
    ) -> None:
        """Keep a function that changes the tensors `changed`.

        `on_restored` is called when these have former values again. `on_failure` learns why there
        is no graph, before the function is called again.
        """
        self._function = function
        self._changed = list(changed)
        self._on_restored = on_restored
        self._device = device
        self._on_failure = on_failure
        self._calls = 0
        make = RECORDERS.get(device.type)
        self._record = None if make is None else make(device)
        self._replay: Call | None = None
        self._stream: torch.cuda.Stream | None = getattr(self._record, "stream", None)

    @property
    def recorded(self) -> bool:
        return self._replay is not None

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Launch on the stream of the calls, behind what the current stream has launched."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what the current stream launches next wait for the calls made so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def __call__(self) -> None:
        """Launch the function's work; in `own_stream`."""
        self._calls += 1
        if self._replay is not None:
            self._replay()
        elif self._record is not None and self._calls > WARMUP_CALLS:
            self._record_checked(self._record)
        else:
            self._function()

    def _record_checked(self, record: Recorder) -> None:
        """Make one call twice from the same state, plainly and recorded, and keep the graph if both
        have changed the same."""
        self._record = None
        try:
            before = [tensor.clone() for tensor in self._changed]
            plain = [torch.empty_like(tensor) for tensor in self._changed]
        except torch.OutOfMemoryError:
            self._on_failure("the step is not recorded as a CUDA graph: no memory to check it")
            self._function()
            return
        self._function()
        torch._foreach_copy_(plain, self._changed)
        self._restore(before)
        # Whatever the driver or a library refuses: the same work is launched piece by piece.
        try:
            replay = record(self._function)
            replay()
            failure = "" if is_same_change(before, plain, self._changed) else "it has other results"
        except RuntimeError as error:
            failure = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        if failure:
            self._on_failure(f"the step could not be recorded as a CUDA graph: {failure}")
            self._restore(plain)
            return
        self._replay = replay

    def _restore(self, values: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._changed, list(values))
        self._on_restored()


def is_same_change(
    before: Sequence[Tensor], expected: Sequence[Tensor], changed: Sequence[Tensor]
) -> bool:
    """Return whether each tensor was changed as expected, up to CHANGE_TOLERANCE."""
    for first, end, other in zip(before, expected, changed, strict=True):
        change = float((end.double() - first.double()).norm())
        difference = float((other.double() - end.double()).norm())
        # Not the other way round: what is not a number is no such change.
        if not difference <= CHANGE_TOLERANCE * change:
            return False
    return True
