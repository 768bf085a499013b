"""What a user reads when farspan refuses: one shape for every refusal, one exit code for every
kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from farspan.domain.escapes import one_line, shell_line

#: Exit code of every kind of problem. 0 is success, 1 an unexpected crash, 2 the shell's own "bad
#: usage". Numbers are part of the interface: scripts test them, so a code keeps its number for
#: ever.
EXIT_CODES = {
    "usage": 2,
    "path-missing": 10,
    "no-documents": 11,
    "corpus-too-small": 12,
    "not-utf8": 13,
    "unknown-key": 14,
    "out-of-range": 15,
    "tokenizer-mismatch": 16,
    "disk-full": 17,
    "run-exists": 18,
    "checkpoint-corrupt": 19,
    "non-finite": 20,
    "out-of-memory": 21,
    "not-a-run": 22,
    "extra-missing": 23,
    "worker-lost": 24,
    "plan-mismatch": 25,
    "no-index": 26,
    "source-unreadable": 27,
    "device-missing": 28,
    "tokenizer-unreadable": 29,
    "model-unsupported": 30,
    "cannot-plan": 31,
    "path-unusable": 32,
    "run-busy": 33,
    "file-unreadable": 34,
    "cluster-invalid": 35,
    "host-unreachable": 36,
    "lab-unavailable": 37,
    "version-mismatch": 38,
    "launcher-unusable": 39,
    "cannot-export": 40,
    "loss-spike": 41,
    "run-untrusted": 42,
    "device-unusable": 43,
    "not-running": 44,
    "superseded": 45,
    "store-unreachable": 46,
    "store-foreign": 47,
    "store-mismatch": 48,
    "port-taken": 49,
    "preempted": 50,
    "corpus-damaged": 51,
    "device-busy": 52,
    "encoder-missing": 53,
    "no-model": 57,
    "llm-unusable": 58,
    "install-failed": 62,
    "copy-unusable": 60,
    "fabric-unusable": 66,
    "slice-failed": 67,
    "hub-unusable": 68,
    "interrupted": 130,
}


#: What mends a run whose workers need more memory than there is.
LESS_MEMORY = "set train.recompute: true in run.yaml, or a smaller batch or size"

#: Why a worker ended: by an error of its own, or in an exchange, which fails for another worker's
#: sake.
Cause = Literal["own", "exchange"]


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One refusal: a stable code, what was refused, where, the fact behind it, and one command that
    mends it.

    Further fields hold what programs need to know of it.
    """

    code: str
    what: str
    where: str
    fact: str
    remedy: str
    #: With which `what` begins, where others share the rest of it.
    subject: str | None = None
    cause: Cause | None = None
    #: The key of run.yaml whose value is refused.
    key: str | None = None
    #: The step, from 0 on, whose gradient was not finite.
    step: int | None = None
    #: The signal that ended a worker ("SIGKILL"), its rank and host, and the last line of its log.
    signal: str | None = None
    rank: int | None = None
    host: str | None = None
    last_words: str | None = None
    #: What a worker may have been killed for, where the system does not report it.
    suspected: Literal["memory"] | None = None
    #: All workers that were preempted together; `rank` is the first of them.
    ranks: tuple[int, ...] = ()
    #: The hosts of these that are being taken away; the signal to others was for a process alone.
    leaving: tuple[str, ...] = ()

    @property
    def predicate(self) -> str:
        """`what` without its subject."""
        return self.what.removeprefix(f"{self.subject} ")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.code]

    def __str__(self) -> str:
        # A name with a line break must not look like a line of its own, such as another fix.
        what = one_line(self.what)
        where = one_line(self.where)
        fact = self.fact.replace("\n", "\n         ")
        return (
            f"error[{self.code}]: {what}\n  where: {where}\n  fact:  {fact}\n  fix:   {self.remedy}"
        )


class Finding(Problem, frozen=True, kw_only=True):
    """A problem of a machine or a cluster. A `refused` one stops a run, a `warned` one only makes
    it worse."""

    severity: Literal["refused", "warned"]

    @classmethod
    def of(cls, problem: Problem, severity: Literal["refused", "warned"]) -> Finding:
        return cls(severity=severity, **msgspec.structs.asdict(problem))


def exit_code_of(findings: Iterable[Finding]) -> int:
    """Return the code of the first finding that stops a run; 0 where none does."""
    return next((each.exit_code for each in findings if each.severity == "refused"), 0)


class Refusal(Exception):
    """Raised to refuse; carries the Problem that the command line prints and turns into an exit
    code."""

    def __init__(
        self, code: str, *, what: str, where: object, fact: str, remedy: str, **more: Any
    ) -> None:
        """`more`: the further fields of Problem."""
        if code not in EXIT_CODES:
            raise ValueError(f"unknown problem code {code!r}: add it to EXIT_CODES")
        self.problem = Problem(
            code=code, what=what, where=str(where), fact=fact, remedy=remedy, **more
        )
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle whole: a refusal in a worker process reaches its parent so."""
        return Refusal.of, (self.problem,)

    @classmethod
    def of(cls, problem: Problem) -> Refusal:
        """Make the exception for a Problem that another process wrote down."""
        return cls(**msgspec.structs.asdict(problem))


def command(*words: object) -> str:
    """`farspan WORDS...`, quoted for a shell: what a remedy offers to be copied."""
    return shell_line("farspan", *words)
