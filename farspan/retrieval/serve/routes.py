"""The page, and the API beside it that the page itself uses."""

# No `from __future__ import annotations`: FastAPI reads the annotations of functions inside
# functions.
import threading
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from farspan._version import __version__
from farspan.domain.problems import Refusal, command
from farspan.retrieval.rank import System
from farspan.retrieval.search import Answer, Result
from farspan.retrieval.serve import forms
from farspan.retrieval.serve.guard import PAGE_POLICY, REPORT_POLICY
from farspan.retrieval.serve.page import Files
from farspan.retrieval.serve.refusals import Turned, json_answer
from farspan.retrieval.serve.searcher import Searcher
from farspan.retrieval.serve.site import Site, at_most, given, parsed, taken

#: Parameters of a search that are no fields.
OWN = ("q", "k", "offset", "system")
#: What a parameter may begin with that is a field, and must where the field is called like one of
#: these.
PREFIX = "where."
#: How OpenAPI says that any field may be a parameter.
_FIELDS = {
    "name": "fields",
    "in": "query",
    "style": "form",
    "explode": True,
    "required": False,
    "description": "fields that /api/about names, and the value of each",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}
Id = Annotated[str, Path(max_length=64, description="a passage's `id`: 16 hexadecimal digits")]


def routes(site: Site, files: Files) -> APIRouter:
    """Every route but OpenAI's."""
    router = APIRouter()
    _pages(router, site, files)
    _searches(router, site)
    _more(router, site)
    return router


def _pages(router: APIRouter, site: Site, files: Files) -> None:
    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(
            files.page, headers={"content-security-policy": PAGE_POLICY}, media_type="text/html"
        )

    @router.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        # Names are those of files read when the server started: none leads to the disk.
        if name not in files.static:
            raise _nothing(f"/static/{name[:40]}")
        content, kind = files.static[name]
        return Response(content, headers={"cache-control": "no-cache"}, media_type=kind)

    @router.get("/report", include_in_schema=False)
    def report() -> Response:
        try:
            content = site.served.report.read_bytes()
        except FileNotFoundError:
            raise Turned(
                404,
                "path-missing",
                what="the run has no report yet",
                where="/report",
                fact="report.html is missing",
                remedy=command("report", site.served.report.parent),
            ) from None
        return Response(
            content, headers={"content-security-policy": REPORT_POLICY}, media_type="text/html"
        )

    @router.get(
        "/healthz",
        response_class=Response,
        responses=given(forms.Healthy),
        summary="Whether the server is up",
    )
    async def health() -> Response:
        return json_answer(forms.Healthy())


def _searches(router: APIRouter, site: Site) -> None:
    limits = site.limits

    @router.get(
        "/api/search",
        response_class=Response,
        responses=given(Answer),
        summary="Search the documents",
        description=(
            "Further parameters narrow it: FIELD=VALUE, or where.FIELD=VALUE, of the fields in "
            "/api/about."
        ),
        openapi_extra={"parameters": [_FIELDS]},
    )
    async def search(
        request: Request,
        q: Annotated[str, Query(max_length=limits.query_chars, description="what to search for")],
        k: Annotated[int, Query(ge=1, le=limits.k, description="results at once")] = 10,
        offset: Annotated[
            int, Query(ge=0, le=limits.offset, description="results to pass over")
        ] = 0,
        system: Annotated[
            System | None, Query(description="search this way, whatever was measured")
        ] = None,
    ) -> Response:
        form = forms.Search(q=q, k=k, offset=offset, system=system, where=_filters(request))
        return await _searched(site, form, "parameter q")

    @router.post(
        "/api/search",
        response_class=Response,
        responses=given(Answer),
        openapi_extra=taken(forms.Search),
        summary="Search the documents for a long text",
    )
    async def search_text(request: Request) -> Response:
        form = parsed(await request.body(), forms.Search, "POST /api/search")
        at_most(len(form.q), limits.query_chars, "characters", "key q")
        at_most(form.k, limits.k, "results", "key k")
        at_most(form.offset, limits.offset, "results to pass over", "key offset")
        return await _searched(site, form, "key q")

    @router.get(
        "/api/passages/{id}",
        response_class=Response,
        responses=given(Result),
        summary="One passage, with its place",
    )
    async def passage(id: Id) -> Response:
        return json_answer(await _found(site, lambda searcher: searcher.passage(id)))

    @router.get(
        "/api/passages/{id}/similar",
        response_class=Response,
        responses=given(forms.Similar),
        summary="The nearest passages of other documents",
    )
    async def similar(id: Id, k: Annotated[int, Query(ge=1, le=limits.k)] = 5) -> Response:
        results = await _found(site, lambda searcher: searcher.similar(id, k))
        return json_answer(forms.Similar(id=id, results=tuple(results)))


async def _searched(site: Site, form: forms.Search, place: str) -> Response:
    """The answer to a search; refuses (usage) an empty query, which stands at `place`."""
    if not form.q.strip():
        raise Refusal(
            "usage",
            what="there is nothing to search for",
            where=place,
            fact="the query is empty",
            remedy="ask with words: /api/search?q=read+a+file",
        )

    def work(searcher: Searcher) -> Answer:
        return searcher.search(form.q, form.k, form.system, form.where or None, form.offset)

    return json_answer(await site.ask(work))


def _filters(request: Request) -> dict[str, str]:
    """Fields and their values, of an address."""
    where = dict[str, str]()
    for name, value in request.query_params.multi_items():
        field = name.removeprefix(PREFIX)
        if field in where:
            raise Refusal(
                "usage",
                what=f"the field {field[:60]!r} is given twice",
                where="the address of the search",
                fact="a document has one value in each field",
                remedy="leave one of them out",
            )
        if name not in OWN:
            where[field] = value
    return where


async def _found(site: Site, work: Any) -> Any:
    """What a passage is asked for; 404 where there is no such passage."""
    try:
        return await site.ask(work)
    except Refusal as refusal:
        problem = refusal.problem
        if problem.code != "usage":
            raise
        raise Turned(
            404,
            problem.code,
            what=problem.what,
            where=problem.where,
            fact=problem.fact,
            remedy=problem.remedy,
        ) from None


def _more(router: APIRouter, site: Site) -> None:
    @router.get(
        "/api/map",
        response_class=Response,
        responses=given(forms.Map),
        summary="The corpus as a plane",
    )
    async def corpus_map() -> Response:
        encoded: bytes = await site.writing.run(lambda: site.current.once("map", _map))
        return Response(encoded, media_type="application/json")

    @router.get(
        "/api/about",
        response_class=Response,
        responses=given(forms.About),
        summary="What is served",
    )
    async def about() -> Response:
        def told(searcher: Searcher) -> forms.About:
            served = site.served
            return forms.About(
                name=served.name,
                version=__version__,
                model=served.model,
                text=served.text,
                index=searcher.manifest,
                fields=searcher.fields,
                report=served.report.exists(),
                limits=site.limits,
                trouble=site.current.trouble,
            )

        return json_answer(await site.ask(told))

    @router.post(
        "/api/generate",
        response_class=Response,
        responses=given(forms.Generated),
        openapi_extra=taken(forms.Generate),
        summary="Let the model write after a prompt",
    )
    async def generate(request: Request) -> Response:
        form = parsed(await request.body(), forms.Generate, "POST /api/generate")
        at_most(form.tokens, site.limits.tokens, "tokens", "key tokens")
        at_most(len(form.prompt), site.limits.prompt_chars, "characters", "key prompt")
        enough = threading.Event()
        try:
            text = await site.ask(
                lambda searcher: searcher.generate(
                    form.prompt, form.tokens, form.temperature, form.top_k, form.seed, enough.is_set
                ),
                site.writing,
            )
        finally:
            # Nobody waits any longer: for lack of time, or as the server ends.
            enough.set()
        return json_answer(forms.Generated(prompt=form.prompt, text=text))


def _map(searcher: Searcher) -> bytes:
    ids, xy_N2 = searcher.map()
    passages = [searcher.passage(chunk_id) for chunk_id in ids]
    return msgspec.json.encode(
        forms.Map(
            ids=ids,
            xy=[(round(x, 4), round(y, 4)) for x, y in xy_N2.tolist()],
            titles=[passage.title for passage in passages],
            origins=[passage.origin for passage in passages],
        )
    )


def _nothing(place: str) -> Turned:
    return Turned(
        404,
        "path-missing",
        what="there is nothing at this address",
        where=place,
        fact="no page and no call of the API has it",
        remedy="see /openapi.json for what there is",
    )
