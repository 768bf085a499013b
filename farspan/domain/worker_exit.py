"""The record of how one worker ended."""

from __future__ import annotations

from typing import Literal

import msgspec

from farspan.domain.problems import Problem

#: Whether the kernel killed a worker because memory ran out ("memory"), did not ("other"), or may
#: have ("open").
KillCause = Literal["memory", "other", "open"]


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker of a rank ended: all evidence of it, the most trusted first."""

    rank: int
    host: str
    #: What it wrote before it ended, of itself or of a peer that it had lost.
    problem: Problem | None = None
    #: Its exit code, negative for a signal; None where its launcher could not ask any more.
    code: int | None = None
    #: What the launcher reports of that.
    fact: str = ""
    #: Of one that was killed: whether for memory, and how much it held and was predicted to need.
    killed_for: KillCause = "other"
    memory: str = ""
    #: The log that it wrote to, and the last line of that.
    log: str = ""
    last_words: str = "none"
