"""A plan as another system's configuration, or every reason why that system cannot run it.

A system either expresses a plan exactly or says why it cannot. One thing is changed, and said:
gradients accumulated over unlike parts of a device's rows are accumulated over the next larger
number of like ones, which needs less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from farspan.domain.escapes import shell_word
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.units import format_seconds
from farspan.planning.ranking import Ranking
from farspan_exports.regular import evened


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A file for another system. `notes` is what the file cannot say and its user must do."""

    system: str
    #: Of the system, as the file was written for it.
    version: str
    file: str
    text: str
    notes: tuple[str, ...]


class Exporter(msgspec.Struct, frozen=True, kw_only=True):
    """One system. An entry point of `farspan.exports` names it."""

    name: str
    version: str
    #: The usual name of its file.
    file: str
    #: Why the system cannot run a plan; none where it can.
    reasons: Callable[[Plan], Sequence[str]]
    #: The configuration of a plan without such reasons.
    write: Callable[[Plan], str]
    #: What the configuration cannot say.
    notes: Callable[[Plan], Sequence[str]]

    def export(self, plan: Plan) -> Exported:
        """Return the plan in the system's own configuration; raises Refusal (cannot-export) with
        every reason why not."""
        parts = plan.replicas[0].microbatches
        plan = evened(plan)
        if reasons := self.reasons(plan):
            remedy = "farspan plan --technique fsdp, with the same model and cluster"
            if plan.train.optimizer.muon:
                remedy = "set train.optimizer: adamw in run.yaml"
            raise Refusal(
                "cannot-export",
                what=f"{self.name} cannot run this plan of {plan.technique}",
                where=f"--export {self.name}",
                fact="; ".join(reasons),
                remedy=remedy,
            )
        notes = list(self.notes(plan))
        if (now := plan.replicas[0].microbatches) != parts:
            notes.append(
                f"gradients are accumulated over {now} parts, all alike; the plan has {parts} "
                "parts of unlike size"
            )
        return Exported(
            system=self.name,
            version=self.version,
            file=self.file,
            text=self.write(plan),
            notes=tuple(notes),
        )

    def exportable(self, ranking: Ranking) -> Plan | None:
        """Return the chosen plan, None where nothing is chosen; a Refusal names the best candidate
        that the system can run."""
        if ranking.chosen is None:
            return None
        plan = ranking.candidates[ranking.chosen].plan
        reasons = self.reasons(evened(plan))
        if not reasons:
            return plan
        eligible = (candidate for candidate in ranking.candidates if candidate.eligible)
        able = next(
            (candidate for candidate in eligible if not self.reasons(evened(candidate.plan))), None
        )
        fact = "it can run none of the other plans either"
        if able is not None:
            fact = (
                f"the best plan it can run: {able.technique} on {able.where}, "
                f"{format_seconds(able.time_s)}"
            )
        raise Refusal(
            "cannot-export",
            what=f"{self.name} cannot run {plan.technique}: {'; '.join(reasons)}",
            where=f"--export {self.name}",
            fact=fact,
            remedy=f"add --technique {shell_word(able.technique)}"
            if able
            else "farspan train --plan, which runs any plan",
        )
