"""Requests and responses of the API, without the answers of a search. Its OpenAPI schema is made
from these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from farspan.domain.problems import Problem
from farspan.retrieval.cited_answer import ASKED_PASSAGES, MAX_ASKED_PASSAGES
from farspan.retrieval.hybrid_ranking import System
from farspan.retrieval.index import IndexManifest
from farspan.retrieval.search import Result
from farspan.retrieval.serve.limits import Limits


class Search(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to search for. `where` holds fields and what each must hold: a value, a list of values,
    or `{"gte", "gt", "lte", "lt", "not"}`; or a list of texts such as `year>=2020`."""

    q: str
    k: Annotated[int, msgspec.Meta(ge=1)] = 10
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    system: System | None = None
    where: dict[str, Any] | list[str] = {}
    #: The number of a topic of /api/topics.
    topic: int | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question for the language model, which answers from the `k` best passages."""

    q: str
    k: Annotated[int, msgspec.Meta(ge=1, le=MAX_ASKED_PASSAGES)] = ASKED_PASSAGES
    system: System | None = None
    where: dict[str, Any] | list[str] = {}


class Generate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model is to write after. Temperature 0 takes the likeliest token each time."""

    prompt: str = ""
    tokens: Annotated[int, msgspec.Meta(ge=1)] = 100
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.8
    top_k: Annotated[int, msgspec.Meta(ge=1)] = 50
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    text: str


class Similar(msgspec.Struct, frozen=True, kw_only=True):
    """The passages of other documents that are nearest to one, best first."""

    id: str
    results: tuple[Result, ...]


class ModelAbout(msgspec.Struct, frozen=True, kw_only=True):
    """The model of the run: in words, how many parameters, and the tokens that it reads at once."""

    line: str
    parameters: int
    context: int


class TextAbout(msgspec.Struct, frozen=True, kw_only=True):
    """The text that the run was trained on."""

    source: str
    documents: int
    bytes: int


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is served. `trouble`: why a newer index on disk could not be opened."""

    name: str
    version: str
    #: The model, and the text that it was trained on; None where only the index is known.
    model: ModelAbout | None
    text: TextAbout | None
    index: IndexManifest
    fields: tuple[str, ...]
    report: bool
    #: The name of the language model that answers questions; None without one.
    llm: str | None
    limits: Limits
    trouble: Problem | None = None


class Embed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As OpenAI's API has it. `input_type` is an addition; without it texts that begin with "query:
    " are queries."""

    input: str | list[str | int | list[int]]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    #: Taken as OpenAI's clients send it; nothing is done with it.
    user: str | None = None
    input_type: Literal["query", "document"] | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """`embedding` as base64 is of float32 numbers, little-endian."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """`cut` is an addition: the tokens at the end of each text that the model did not read."""

    data: list[Embedding]
    model: str
    usage: Usage
    cut: list[int]
    object: Literal["list"] = "list"


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: Literal["farspan"] = "farspan"


class Models(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelEntry]
    object: Literal["list"] = "list"


class Healthy(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"
