"""The page, and the API that the page itself uses."""

# No `from __future__ import annotations`: FastAPI reads the annotations of functions inside
# functions.
import threading
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from starlette.responses import Response

from farspan._version import __version__
from farspan.domain.problems import Refusal, command
from farspan.retrieval.browse import Documents
from farspan.retrieval.cited_answer import CitedAnswer
from farspan.retrieval.hybrid_ranking import System
from farspan.retrieval.llm_endpoint import answer_from, no_llm
from farspan.retrieval.search import Answer, Result
from farspan.retrieval.serve import forms
from farspan.retrieval.serve.access import Check, accept_link
from farspan.retrieval.serve.guard import PAGE_POLICY, REPORT_POLICY, Entrance
from farspan.retrieval.serve.page import Files
from farspan.retrieval.serve.refusals import HttpRefusal, json_response
from farspan.retrieval.serve.schema import answers, takes
from farspan.retrieval.serve.searcher import Searcher
from farspan.retrieval.serve.site import ServedIndex, refuse_above
from farspan.retrieval.topics import Topics

#: Parameters of a search that are no fields.
SEARCH_PARAMETERS = ("q", "k", "offset", "system", "topic")
#: What a parameter may begin with that is a field, and must where the field is called like one of
#: these.
FIELD_PREFIX = "where."
#: How OpenAPI says that any field may be a parameter.
FIELDS_PARAMETER = {
    "name": "fields",
    "in": "query",
    "style": "form",
    "explode": True,
    "required": False,
    "description": "fields that /api/about names, and the value of each",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}
#: As far as a list of documents can be paged.
MAX_LISTED_OFFSET = 10_000_000
Id = Annotated[str, Path(max_length=64, description="a passage's `id`: 16 hexadecimal digits")]


def static_routes(files: Files) -> APIRouter:
    """Return the routes that need no token: nothing of the run is in their answers."""
    router = APIRouter()

    @router.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        # Names are those of files read when the server started: none leads to the disk.
        if name not in files.static:
            raise HTTPException(404)
        content, kind = files.static[name]
        return Response(content, headers={"cache-control": "no-cache"}, media_type=kind)

    @router.get(
        "/healthz",
        response_class=Response,
        responses={200: answers(forms.Healthy)},
        summary="Whether the server is up",
    )
    async def health() -> Response:
        return json_response(forms.Healthy())

    return router


def page_routes(
    site: ServedIndex, files: Files, entrance: Entrance, check_token: Check
) -> APIRouter:
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        redirect = accept_link(request, entrance)
        if redirect is not None:
            return redirect
        await check_token(request)
        headers = {"content-security-policy": PAGE_POLICY}
        return Response(files.page, headers=headers, media_type="text/html")

    @router.get("/report", include_in_schema=False, dependencies=[Depends(check_token)])
    def report() -> Response:
        path = site.served.report
        try:
            if path is None:
                raise FileNotFoundError
            content = path.read_bytes()
        except FileNotFoundError:
            raise HttpRefusal(
                404,
                "path-missing",
                what="the run has no report yet",
                where="/report",
                fact="report.html is missing",
                remedy=command("report", path.parent if path else "RUN"),
            ) from None
        headers = {"content-security-policy": REPORT_POLICY}
        return Response(content, headers=headers, media_type="text/html")

    return router


def api_routes(site: ServedIndex) -> APIRouter:
    """Return the routes of the API but OpenAI's."""
    router = APIRouter()
    _add_search(router, site)
    _add_answers(router, site)
    _add_passages(router, site)
    _add_browsing(router, site)
    _add_model(router, site)
    return router


def _add_search(router: APIRouter, site: ServedIndex) -> None:
    limits = site.limits

    @router.get(
        "/api/search",
        response_class=Response,
        responses={200: answers(Answer)},
        summary="Search the documents",
        description=(
            "Further parameters narrow it: FIELD=VALUE, or where.FIELD=VALUE, of the fields in "
            "/api/about. VALUE may be several (de,en) or a range (2020..2024); FIELD may end in !, "
            "< or >, as in year>=2020."
        ),
        openapi_extra={"parameters": [FIELDS_PARAMETER]},
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
        topic: Annotated[
            int | None, Query(ge=0, description="only this topic of /api/topics")
        ] = None,
    ) -> Response:
        where = read_filters(request)
        form = forms.Search(q=q, k=k, offset=offset, system=system, where=where, topic=topic)
        return await _answer_search(site, form, "parameter q")

    @router.post(
        "/api/search",
        response_class=Response,
        responses={200: answers(Answer)},
        openapi_extra=takes(forms.Search),
        summary="Search the documents for a long text",
    )
    async def search_text(request: Request) -> Response:
        form = await site.parse_body(request, forms.Search)
        refuse_above(len(form.q), limits.query_chars, "characters", "key q")
        refuse_above(form.k, limits.k, "results", "key k")
        refuse_above(form.offset, limits.offset, "results to pass over", "key offset")
        return await _answer_search(site, form, "key q")


def _add_answers(router: APIRouter, site: ServedIndex) -> None:
    @router.post(
        "/api/ask",
        response_class=Response,
        responses={200: answers(CitedAnswer)},
        openapi_extra=takes(forms.Ask),
        summary="Answer a question from the best passages, with citations",
    )
    async def ask(request: Request) -> Response:
        form = await site.parse_body(request, forms.Ask)
        refuse_above(len(form.q), site.limits.query_chars, "characters", "key q")
        _refuse_empty(form.q, "key q")
        llm = site.served.llm
        if llm is None:
            raise no_llm("POST /api/ask")

        def find(searcher: Searcher) -> Answer:
            return searcher.search(form.q, form.k, form.system, form.where or None)

        # The index is not kept open while the language model writes.
        found_answer = await site.ask(find)
        results = found_answer.results

        def write() -> CitedAnswer:
            return answer_from(llm, form.q, results)

        return json_response(await site.asking.run(write))


def _add_passages(router: APIRouter, site: ServedIndex) -> None:
    limits = site.limits

    @router.get(
        "/api/passages/{id}",
        response_class=Response,
        responses={200: answers(Result)},
        summary="One passage, with its place",
    )
    async def passage(id: Id) -> Response:
        return json_response(await _ask_for_passage(site, lambda searcher: searcher.passage(id)))

    @router.get(
        "/api/passages/{id}/similar",
        response_class=Response,
        responses={200: answers(forms.Similar)},
        summary="The nearest passages of other documents",
    )
    async def similar(id: Id, k: Annotated[int, Query(ge=1, le=limits.k)] = 5) -> Response:
        results = await _ask_for_passage(site, lambda searcher: searcher.similar(id, k))
        return json_response(forms.Similar(id=id, results=tuple(results)))


def _add_browsing(router: APIRouter, site: ServedIndex) -> None:
    limits = site.limits

    @router.get(
        "/api/documents",
        response_class=Response,
        responses={200: answers(Documents)},
        summary="The documents, page by page",
        description="Further parameters narrow it, as those of /api/search do.",
        openapi_extra={"parameters": [FIELDS_PARAMETER]},
    )
    async def documents(
        request: Request,
        k: Annotated[int, Query(ge=1, le=limits.k, description="documents at once")] = 10,
        offset: Annotated[
            int, Query(ge=0, le=MAX_LISTED_OFFSET, description="documents to pass over")
        ] = 0,
        topic: Annotated[
            int | None, Query(ge=0, description="only this topic of /api/topics")
        ] = None,
    ) -> Response:
        where = read_filters(request)

        def list_page(searcher: Searcher) -> Documents:
            return searcher.documents(k, offset, where, topic)

        return json_response(await site.ask(list_page))

    @router.get(
        "/api/topics",
        response_class=Response,
        responses={200: answers(Topics)},
        summary="Groups of documents that are alike",
    )
    async def topics() -> Response:
        found_topics = await site.ask(lambda searcher: searcher.topics(), site.writing)
        return json_response(found_topics)


async def _answer_search(site: ServedIndex, form: forms.Search, place: str) -> Response:
    """Return the answer to a search. Raises Refusal (usage) for an empty query, at `place`."""
    _refuse_empty(form.q, place)

    def work(searcher: Searcher) -> Answer:
        where = form.where or None
        return searcher.search(form.q, form.k, form.system, where, form.offset, form.topic)

    return json_response(await site.ask(work))


def _refuse_empty(query: str, place: str) -> None:
    if not query.strip():
        raise Refusal(
            "usage",
            what="there is nothing to search for",
            where=place,
            fact="the query is empty",
            remedy="ask with words: /api/search?q=read+a+file",
        )


def read_filters(request: Request) -> list[str]:
    """Return the conditions of an address: `year=2021`, and `year>=2020` as it is written there."""
    conditions = []
    for name, value in request.query_params.multi_items():
        if name not in SEARCH_PARAMETERS:
            conditions.append(f"{name.removeprefix(FIELD_PREFIX)}={value}")
    return conditions


async def _ask_for_passage(site: ServedIndex, work: Any) -> Any:
    """Run `work` on a passage; 404 where there is no such passage."""
    try:
        return await site.ask(work)
    except Refusal as refusal:
        if refusal.problem.code != "usage":
            raise
        raise HttpRefusal.of(404, refusal.problem) from None


def _add_model(router: APIRouter, site: ServedIndex) -> None:
    @router.get(
        "/api/about",
        response_class=Response,
        responses={200: answers(forms.About)},
        summary="What is served",
    )
    async def about() -> Response:
        def describe(searcher: Searcher) -> forms.About:
            served = site.served
            has_report = served.report is not None and served.report.exists()
            llm = None if served.llm is None else served.llm.model
            return forms.About(
                name=served.name,
                version=__version__,
                model=served.model,
                text=served.text,
                index=searcher.manifest,
                fields=searcher.fields,
                report=has_report,
                llm=llm,
                limits=site.limits,
                trouble=site.current.trouble,
            )

        return json_response(await site.ask(describe))

    @router.post(
        "/api/generate",
        response_class=Response,
        responses={200: answers(forms.Generated)},
        openapi_extra=takes(forms.Generate),
        summary="Let the model write after a prompt",
    )
    async def generate(request: Request) -> Response:
        form = await site.parse_body(request, forms.Generate)
        refuse_above(form.tokens, site.limits.tokens, "tokens", "key tokens")
        refuse_above(len(form.prompt), site.limits.prompt_chars, "characters", "key prompt")
        enough = threading.Event()

        def write(searcher: Searcher) -> str:
            return searcher.generate(
                form.prompt, form.tokens, form.temperature, form.top_k, form.seed, enough.is_set
            )

        try:
            text = await site.ask(write, site.writing)
        finally:
            # Nobody waits any longer: for lack of time, or as the server ends.
            enough.set()
        return json_response(forms.Generated(prompt=form.prompt, text=text))
