"""One server: what it serves, and the functions that its routes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farspan.domain.codec import parse_json
from farspan.domain.problems import Refusal
from farspan.retrieval.search import Answer, Result
from farspan.retrieval.serve import forms
from farspan.retrieval.serve.current import Current
from farspan.retrieval.serve.lanes import Lane
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.refusals import OpenAITrouble, Trouble, Turned
from farspan.retrieval.serve.searcher import Searcher

T = TypeVar("T")

ANSWERS = (
    Answer,
    forms.Search,
    forms.Similar,
    forms.Map,
    forms.About,
    forms.Generate,
    forms.Generated,
    forms.Embed,
    forms.Embeddings,
    forms.Models,
    forms.Healthy,
    Trouble,
    OpenAITrouble,
    Result,
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A run as it is served: `name` is also its model's; `created` is the model's, in seconds since
    the epoch."""

    name: str
    created: int
    report: Path
    model: forms.ModelAbout | None = None
    text: forms.TextAbout | None = None


class Site:
    """What the routes work with. Close it after use."""

    def __init__(
        self, served: Served, open_searcher: Callable[[], Searcher], limits: Limits
    ) -> None:
        self.served, self.limits = served, limits
        self.current = Current(open_searcher, look_s=limits.look_s, retry_s=limits.retry_s)
        #: What is quick, so that it does not wait for what takes long.
        self.searching = Lane(
            "search",
            threads=limits.searching,
            waiting=limits.searching_waiting,
            limit_s=limits.search_s,
        )
        self.writing = Lane(
            "write", threads=limits.writing, waiting=limits.writing_waiting, limit_s=limits.write_s
        )

    async def ask(self, work: Callable[[Searcher], T], lane: Lane | None = None) -> T:
        """What `work` makes of the index of today, on a thread of `lane` (searching)."""

        def leased() -> T:
            with self.current.lease() as searcher:
                return work(searcher)

        return await (lane or self.searching).run(leased)

    def close(self) -> None:
        for lane in (self.searching, self.writing):
            lane.close(1.0)
        self.current.close()


def parsed(body: bytes, kind: type[T], place: str) -> T:
    """The body of a request; refuses one that is not as it should be, and says where."""
    try:
        return parse_json(body, kind, place)
    except Refusal as refusal:
        what = refusal.problem.what.replace("the file", "the body")
        raise Refusal.of(msgspec.structs.replace(refusal.problem, what=what)) from None


def at_most(value: int, most: int, what: str, place: str) -> None:
    if value > most:
        raise Turned(
            422,
            "out-of-range",
            what=f"too many {what} at once",
            where=place,
            fact=f"{value:,}; at most {most:,}",
            remedy=f"ask for {most:,} at a time",
        )


def given(kind: type) -> dict[int | str, dict[str, Any]]:
    """How a route says that it answers with `kind`."""
    return {
        200: {
            "description": " ".join((kind.__doc__ or "").split()),
            "content": {"application/json": _ref(kind)},
        }
    }


def taken(kind: type) -> dict[str, Any]:
    """How a route says that its body is a `kind`."""
    return {"requestBody": {"required": True, "content": {"application/json": _ref(kind)}}}


def _ref(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}


def components() -> dict[str, Any]:
    """The schemas that `given` and `taken` name."""
    return msgspec.json.schema_components(ANSWERS, ref_template="#/components/schemas/{name}")[1]
