"""The web application: routes, refusals as JSON, and the guard before them all."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from farspan._version import __version__
from farspan.domain.escapes import escape_controls
from farspan.domain.problems import Problem, Refusal
from farspan.retrieval.serve.guard import Entrance, Guard
from farspan.retrieval.serve.lanes import Full, TooSlow
from farspan.retrieval.serve.openai import openai_routes
from farspan.retrieval.serve.page import read_files
from farspan.retrieval.serve.refusals import (
    Trouble,
    Turned,
    invalid,
    problem_answer,
    refusal_answer,
)
from farspan.retrieval.serve.routes import routes
from farspan.retrieval.serve.site import Site, components, given

#: What any call may be answered with instead.
TROUBLES = {
    401: "no token",
    403: "a page of another site asks",
    413: "the body is too large",
    422: "not as it should be",
    431: "the head is too large",
    503: "all busy: again after Retry-After",
    504: "too slow",
}


def create_app(site: Site, entrance: Entrance) -> ASGIApp:
    """The application of a site, as it can be reached."""
    app = FastAPI(
        title=f"farspan: {site.served.name}",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses={
            status: {**given(Trouble)[200], "description": said}
            for status, said in TROUBLES.items()
        },
    )
    files = read_files(site.served.name)
    app.include_router(routes(site, files))
    app.include_router(openai_routes(site))
    _handle(app)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components())
            if entrance.token is not None:
                schema["components"]["securitySchemes"] = {
                    "token": {"type": "http", "scheme": "bearer"}
                }
                schema["security"] = [{"token": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return Guard(app, entrance=entrance, limits=site.limits, locked=files.locked)


def _handle(app: FastAPI) -> None:
    """Each way a request can fail, as a problem."""

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return refusal_answer(error, request.url.path)

    def turned(request: Request, error: Exception) -> Response:
        assert isinstance(error, Turned)
        return problem_answer(error.problem, error.status, request.url.path, error.headers)

    def not_valid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_answer(
            invalid(list(error.errors()), request.url.path), 422, request.url.path
        )

    def nothing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path, f"{request.method} {request.url.path[:80]}"
        wrong = error.status_code == 405
        problem = Problem(
            code="path-missing",
            what="there is nothing at this address",
            where=method,
            fact="it is asked in another way" if wrong else "no page and no call of the API has it",
            remedy="see /openapi.json for what there is",
        )
        return problem_answer(problem, error.status_code, path, error.headers)

    handlers = {
        Refusal: refused,
        Turned: turned,
        RequestValidationError: not_valid,
        HTTPException: nothing,
        Full: _full,
        TooSlow: _too_slow,
        Exception: _fault,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _full(request: Request, error: Exception) -> Response:
    assert isinstance(error, Full)
    problem = Problem(
        code="run-busy",
        what="the server is busy",
        where=request.url.path,
        fact="as many requests wait already as may",
        remedy=f"ask again in {error.seconds:g} s",
    )
    return problem_answer(problem, 503, request.url.path, {"retry-after": str(error.seconds)})


def _too_slow(request: Request, error: Exception) -> Response:
    assert isinstance(error, TooSlow)
    problem = Problem(
        code="run-busy",
        what="the answer takes too long",
        where=request.url.path,
        fact=f"there was none after {error.seconds:g} s",
        remedy="ask for less, or again later",
    )
    return problem_answer(problem, 504, request.url.path)


def _fault(request: Request, error: Exception) -> Response:
    """A fault of farspan's own: who runs the server sees where, who asks does not."""
    lines = traceback.format_exception(error)
    print(escape_controls("".join(lines)), end="", file=sys.stderr)
    problem = Problem(
        code="fault",
        what="farspan made a mistake",
        where=request.url.path,
        fact=type(error).__name__,
        remedy="report it with what the server printed",
    )
    # The server ends the connection after a fault: a client must not use it for its next request.
    return problem_answer(problem, 500, request.url.path, {"connection": "close"})
