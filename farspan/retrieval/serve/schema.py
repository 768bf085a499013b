"""The OpenAPI document: the schemas of answers and bodies are those of their structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from farspan.retrieval.browse import Documents
from farspan.retrieval.cited_answer import CitedAnswer
from farspan.retrieval.search import Answer, Result
from farspan.retrieval.serve import forms, openai_forms
from farspan.retrieval.serve.refusals import OpenAITrouble, Trouble
from farspan.retrieval.topics import Topics

STRUCTS = (
    Answer,
    forms.Search,
    forms.Ask,
    CitedAnswer,
    forms.Similar,
    Topics,
    Documents,
    forms.About,
    forms.Generate,
    forms.Generated,
    forms.Embed,
    forms.Embeddings,
    forms.Models,
    openai_forms.Complete,
    openai_forms.Completion,
    openai_forms.Chat,
    openai_forms.ChatCompletion,
    forms.ModelEntry,
    forms.Healthy,
    Trouble,
    OpenAITrouble,
    Result,
)
#: What any call may be answered with instead.
ERRORS = {
    401: "no token",
    403: "a page of another site asks",
    413: "the body is too large",
    422: "not as it should be",
    431: "the head is too large",
    502: "the language model does not answer",
    503: "all busy: again after Retry-After",
    504: "too slow",
}


def answers(kind: type, description: str = "") -> dict[str, Any]:
    """Return how a route declares an answer that is a `kind`."""
    text = description or " ".join((kind.__doc__ or "").split())
    return {"description": text, "content": {"application/json": reference(kind)}}


def takes(kind: type) -> dict[str, Any]:
    """Return how a route declares that its body is a `kind`."""
    return {"requestBody": {"required": True, "content": {"application/json": reference(kind)}}}


def reference(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}


def error_answers() -> dict[int | str, dict[str, Any]]:
    return {status: answers(Trouble, text) for status, text in ERRORS.items()}


def openapi_document(app: FastAPI, *, needs_token: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    template = "#/components/schemas/{name}"
    structs = msgspec.json.schema_components(STRUCTS, ref_template=template)[1]
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(structs)
    if needs_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document
