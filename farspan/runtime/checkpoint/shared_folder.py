"""Which workers see rank 0's folder of checkpoints: they read and write there, and rank 0 does it
for the others."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from farspan.runtime.checkpoint.far_parts import PartReceiver
from farspan.runtime.comm.collective import Group


class SharedFolder:
    """The folder as one worker has it; `meet` is called by all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The ranks that see it, and where the others send their parts.
        self.near = frozenset([0])
        self.sends_to: tuple[str, int] | None = None
        #: On rank 0, where parts of the others come.
        self.receiver: PartReceiver | None = None
        self._met = False

    def meet(self, group: Group) -> None:
        """Find out, once, which workers see rank 0's folder of checkpoints: they read and write
        there themselves."""
        if group.world == 1 or self._met:
            return
        self._met, mark = True, b""
        if group.rank == 0:
            mark = f".here-{secrets.token_hex(8)}".encode()
            with suppress(OSError):  # Then nobody sees it, and the first save says why.
                self.path.mkdir(exist_ok=True)
                (self.path / mark.decode()).touch(exist_ok=False)
        path = self.path / group.share(mark).decode()
        sees = group.rank == 0 or path.exists()
        self.near = frozenset(rank for rank, seen in enumerate(group.gather(float(sees))) if seen)
        if group.rank == 0:
            path.unlink(missing_ok=True)
        if len(self.near) < group.world:
            self.receiver = PartReceiver(group.secret) if group.rank == 0 else None
            port = group.sum(float(self.receiver.port) if self.receiver else 0.0)[0]
            self.sends_to = group.rank_0, int(port)

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
