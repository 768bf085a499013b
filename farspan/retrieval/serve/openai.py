"""Vectors in the form of OpenAI's API, so that programs made for it can use the run's model."""

from __future__ import annotations

import base64

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.retrieval.serve import forms
from farspan.retrieval.serve.refusals import Turned, json_answer
from farspan.retrieval.serve.searcher import Kind, Searcher
from farspan.retrieval.serve.site import Site, at_most, given, parsed, taken

_PLACE = "POST /v1/embeddings"
#: What a text begins with that is to be embedded as a query.
QUERY = "query: "


def openai_routes(site: Site) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get(
        "/models", response_class=Response, responses=given(forms.Models), summary="The run's model"
    )
    async def models() -> Response:
        entry = forms.ModelEntry(id=site.served.name, created=site.served.created)
        return json_answer(forms.Models(data=[entry]))

    @router.post(
        "/embeddings",
        response_class=Response,
        responses=given(forms.Embeddings),
        openapi_extra=taken(forms.Embed),
        summary="Vectors of texts",
    )
    async def embeddings(request: Request) -> Response:
        form = parsed(await request.body(), forms.Embed, _PLACE)
        texts = _texts(form)
        at_most(len(texts), site.limits.batch, "texts", f"{_PLACE}, key input")
        if form.model != site.served.name:
            raise Turned(
                404,
                "usage",
                what=f"there is no model {form.model[:80]!r}",
                where=f"{_PLACE}, key model",
                fact=f"the model of this server is {site.served.name}",
                remedy=f"set model to {shell_word(site.served.name)}",
            )
        return json_answer(
            await site.ask(lambda searcher: _embed(searcher, form, texts), site.writing)
        )

    return router


def _texts(form: forms.Embed) -> list[str]:
    """The texts of a request; refuses tokens and what is empty."""
    given = [form.input] if isinstance(form.input, str) else form.input
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        raise Refusal(
            "usage",
            what="the input is tokens and not text",
            where=f"{_PLACE}, key input",
            fact="their numbers would be of another tokenizer than the model's",
            remedy="send the text itself",
        )
    blank = next(
        (number for number, text in enumerate(texts) if not text.strip()), 0 if not texts else None
    )
    if blank is not None:
        raise Refusal(
            "usage",
            what="there is nothing to embed",
            where=f"{_PLACE}, key input",
            fact=f"text {blank} is empty" if texts else "the list is empty",
            remedy="leave it out",
        )
    return texts


def _embed(searcher: Searcher, form: forms.Embed, texts: list[str]) -> forms.Embeddings:
    dim = searcher.manifest.dim
    if form.dimensions not in (None, dim):
        raise Refusal(
            "out-of-range",
            what="the vectors have another size",
            where=f"{_PLACE}, key dimensions",
            fact=f"{form.dimensions} numbers are asked for; the index has {dim} a vector",
            remedy=f"set dimensions to {dim:d}, or leave it out",
        )
    kinds = [_kind(text, form) for text in texts]
    vectors, cut, used = np.zeros((len(texts), dim), np.float32), [0] * len(texts), 0
    for kind in dict.fromkeys(kinds):
        rows = [row for row, other in enumerate(kinds) if other == kind]
        own = [
            texts[row] if form.input_type or kind == "document" else texts[row][len(QUERY) :]
            for row in rows
        ]
        vectors[rows], cut_off, tokens = searcher.embed(own, kind)
        used += tokens
        for row, tokens_off in zip(rows, cut_off, strict=True):
            cut[row] = tokens_off
    data = [
        forms.Embedding(index=n, embedding=_written(vector, form))
        for n, vector in enumerate(vectors)
    ]
    return forms.Embeddings(
        data=data,
        model=form.model,
        usage=forms.Usage(prompt_tokens=used, total_tokens=used),
        cut=cut,
    )


def _kind(text: str, form: forms.Embed) -> Kind:
    return form.input_type or ("query" if text.startswith(QUERY) else "document")


def _written(vector_E: np.ndarray, form: forms.Embed) -> list[float] | str:
    if form.encoding_format == "base64":
        return base64.b64encode(vector_E.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector_E]
