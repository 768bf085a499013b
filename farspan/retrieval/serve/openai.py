"""Vectors in the form of OpenAI's API, so that programs made for it can use the run's model."""

from __future__ import annotations

import base64

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from farspan.domain.problems import Refusal
from farspan.retrieval.serve import forms
from farspan.retrieval.serve.openai_text import check_model
from farspan.retrieval.serve.refusals import json_response
from farspan.retrieval.serve.schema import answers, takes
from farspan.retrieval.serve.searcher import Kind, Searcher
from farspan.retrieval.serve.site import ServedIndex, refuse_above

_PLACE = "POST /v1/embeddings"
#: What a text begins with that is to be embedded as a query.
QUERY = "query: "


def openai_routes(site: ServedIndex) -> APIRouter:
    router = APIRouter(prefix="/v1")
    entry = forms.ModelEntry(id=site.served.name, created=site.served.created)

    @router.get(
        "/models",
        response_class=Response,
        responses={200: answers(forms.Models)},
        summary="The run's model",
    )
    async def models() -> Response:
        # Where only an index is open there is no model.
        entries = [entry] if site.served.model is not None else []
        return json_response(forms.Models(data=entries))

    @router.get(
        "/models/{model}",
        response_class=Response,
        responses={200: answers(forms.ModelEntry)},
        summary="The run's model by its name",
    )
    async def one_model(model: str) -> Response:
        check_model(site, model, "GET /v1/models")
        return json_response(entry)

    @router.post(
        "/embeddings",
        response_class=Response,
        responses={200: answers(forms.Embeddings)},
        openapi_extra=takes(forms.Embed),
        summary="Vectors of texts",
    )
    async def embeddings(request: Request) -> Response:
        form = await site.parse_body(request, forms.Embed)
        texts = read_texts(form)
        refuse_above(len(texts), site.limits.batch, "texts", f"{_PLACE}, key input")
        check_model(site, form.model, _PLACE)
        return json_response(
            await site.ask(lambda searcher: embed_texts(searcher, form, texts), site.writing)
        )

    return router


def read_texts(form: forms.Embed) -> list[str]:
    """Return the texts of a request. Raises Refusal (usage) for tokens and for empty texts."""
    inputs = [form.input] if isinstance(form.input, str) else form.input
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < len(inputs):
        raise Refusal(
            "usage",
            what="the input is tokens and not text",
            where=f"{_PLACE}, key input",
            fact="their numbers would be of another tokenizer than the model's",
            remedy="send the text itself",
        )
    blank = [number for number, text in enumerate(texts) if not text.strip()]
    if blank or not texts:
        raise Refusal(
            "usage",
            what="there is nothing to embed",
            where=f"{_PLACE}, key input",
            fact=f"text {blank[0]} is empty" if blank else "the list is empty",
            remedy="leave it out",
        )
    return texts


def embed_texts(searcher: Searcher, form: forms.Embed, texts: list[str]) -> forms.Embeddings:
    dim = searcher.dim
    if form.dimensions not in (None, dim):
        raise Refusal(
            "out-of-range",
            what="the vectors have another size",
            where=f"{_PLACE}, key dimensions",
            fact=f"{form.dimensions} numbers are asked for; the index has {dim} a vector",
            remedy=f"set dimensions to {dim:d}, or leave it out",
        )
    kinds = [text_kind(text, form) for text in texts]
    vectors = np.zeros((len(texts), dim), np.float32)
    cut = np.zeros(len(texts), int)
    tokens_read = 0
    # Queries and documents are embedded apart, each kind at once.
    for kind in dict.fromkeys(kinds):
        rows = [row for row, other in enumerate(kinds) if other == kind]
        has_prefix = kind == "query" and not form.input_type
        bare = [texts[row].removeprefix(QUERY) if has_prefix else texts[row] for row in rows]
        vectors[rows], cut[rows], tokens = searcher.embed(bare, kind)
        tokens_read += tokens
    data = []
    for index, vector in enumerate(vectors):
        data.append(forms.Embedding(index=index, embedding=encode_vector(vector, form)))
    usage = forms.Usage(prompt_tokens=tokens_read, total_tokens=tokens_read)
    return forms.Embeddings(data=data, model=form.model, usage=usage, cut=cut.tolist())


def text_kind(text: str, form: forms.Embed) -> Kind:
    return form.input_type or ("query" if text.startswith(QUERY) else "document")


def encode_vector(vector_E: np.ndarray, form: forms.Embed) -> list[float] | str:
    if form.encoding_format == "base64":
        return base64.b64encode(vector_E.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector_E]
