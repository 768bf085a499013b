"""Recording what a function launches as one CUDA graph (PyTorch, "CUDA semantics", "CUDA Graphs").

A small model's step is some hundreds of kernels of microseconds each, and the host takes 20
microseconds to launch one. Recorded, they are launched together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: Calls before the recorded one: libraries choose their kernels and take their memory in the first
#: ones, which a recording may not.
WARMUP_CALLS = 3


class GraphedCalls:
    """Calls a function of static tensors, after some calls as a CUDA graph. On devices without
    graphs, and where recording fails, it calls the function each time."""

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_failure` learns why recording failed, before the function is called again."""
        self._function = function
        self._device = device
        self._on_failure = on_failure
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._will_record = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Launch on the stream of the calls, behind what the current stream has launched: a
        recording takes no part of another stream's work."""
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
        if self._will_record and self._calls >= WARMUP_CALLS:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._function()
        self._calls += 1

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._will_record = False
        try:
            # Other threads, which read and save, may take memory meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._function()
        # Whatever the driver or a library refuses: the same work is launched piece by piece.
        except RuntimeError as error:
            cause = next(iter(str(error).splitlines()), type(error).__name__)
            self._on_failure(f"the step could not be recorded as a CUDA graph: {cause[:200]}")
            return
        self._graph = graph
