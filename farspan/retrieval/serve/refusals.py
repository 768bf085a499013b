"""Refusals as HTTP answers: a status, and the problem as JSON. No answer holds a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from farspan.domain.escapes import escape_controls, shell_word
from farspan.domain.problems import Problem, Refusal
from farspan.retrieval.serve.request_queue import QueueFull, TooSlow

#: Of the codes that a request can be refused with; other codes are about the server's own files.
STATUS = {
    "usage": 422,
    "out-of-range": 422,
    "unknown-key": 422,
    "file-unreadable": 400,
    "run-busy": 503,
    "llm-unusable": 502,
}
UNAVAILABLE = 503


class Trouble(msgspec.Struct, frozen=True):
    """A refusal as JSON; its fields are what was refused, where, why, and what mends
    it."""

    problem: Problem


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as clients of OpenAI's read it."""

    message: str
    type: str
    code: str
    param: str | None = None


class OpenAITrouble(msgspec.Struct, frozen=True):
    error: OpenAIError
    problem: Problem


class HttpRefusal(Exception):
    """A request that is refused with a status of its own."""

    def __init__(
        self,
        status: int,
        code: str,
        *,
        what: str,
        where: str,
        fact: str,
        remedy: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.headers = headers
        self.problem = Problem(code=code, what=what, where=where, fact=fact, remedy=remedy)
        super().__init__(what)

    @classmethod
    def of(cls, status: int, problem: Problem) -> HttpRefusal:
        return cls(
            status,
            problem.code,
            what=problem.what,
            where=problem.where,
            fact=problem.fact,
            remedy=problem.remedy,
        )

    def response(self, path: str) -> Response:
        return problem_response(self.problem, self.status, path, self.headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def problem_response(
    problem: Problem, status: int, path: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a problem as JSON; under /v1 with what OpenAI's clients look for in addition."""
    if not path.startswith("/v1/"):
        return json_response(Trouble(problem), status, headers)
    return json_response(openai_error(problem, status), status, headers)


def openai_error(problem: Problem, status: int) -> OpenAITrouble:
    """Return a problem as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = f"{problem.what} ({problem.where}): {problem.fact}; {problem.remedy}"
    error = OpenAIError(message=message, type=kind, code=problem.code)
    return OpenAITrouble(error, problem)


def handle_errors(
    app: FastAPI, check_token: Callable[[Request], Coroutine[Any, Any, None]]
) -> None:
    """Answer each way a request can fail with a problem."""

    @app.exception_handler(Refusal)
    def refuse(request: Request, refusal: Refusal) -> Response:
        status = STATUS.get(refusal.problem.code, UNAVAILABLE)
        return problem_response(refusal.problem, status, request.url.path)

    @app.exception_handler(HttpRefusal)
    def refuse_with_status(request: Request, refusal: HttpRefusal) -> Response:
        return refusal.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    def refuse_parameter(request: Request, error: RequestValidationError) -> Response:
        path = request.url.path
        return problem_response(invalid_parameter(error.errors()[0], path), 422, path)

    @app.exception_handler(HTTPException)
    async def refuse_address(request: Request, error: HTTPException) -> Response:
        # Without the token nobody learns which addresses there are.
        try:
            await check_token(request)
        except HttpRefusal as refusal:
            return refusal.response(request.url.path)
        no_method = error.status_code == 405
        problem = Problem(
            code="path-missing",
            what="there is nothing at this address",
            where=f"{request.method} {request.url.path[:80]}",
            fact="it has another method" if no_method else "no page and no call of the API has it",
            remedy="see /openapi.json for what there is",
        )
        return problem_response(problem, error.status_code, request.url.path, error.headers)

    @app.exception_handler(QueueFull)
    def refuse_busy(request: Request, error: QueueFull) -> Response:
        problem = Problem(
            code="run-busy",
            what="the server is busy",
            where=request.url.path,
            fact="as many requests wait already as may",
            remedy=f"ask again in {error.retry_s:d} s",
        )
        return problem_response(problem, 503, request.url.path, {"retry-after": str(error.retry_s)})

    @app.exception_handler(TooSlow)
    def refuse_slow(request: Request, error: TooSlow) -> Response:
        problem = Problem(
            code="run-busy",
            what="the answer takes too long",
            where=request.url.path,
            fact=f"there was none after {error.limit_s:g} s",
            remedy="ask for less, or again later",
        )
        return problem_response(problem, 504, request.url.path)

    @app.exception_handler(ClientDisconnect)
    def end_silently(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)

    @app.exception_handler(Exception)
    def report_fault(request: Request, error: Exception) -> Response:
        # The person that runs the server sees where it was, a client does not.
        lines = traceback.format_exception(error)
        print(escape_controls("".join(lines)), end="", file=sys.stderr)
        problem = Problem(
            code="fault",
            what="farspan made a mistake",
            where=request.url.path,
            fact=type(error).__name__,
            remedy="report it with what the server printed",
        )
        # The server ends the connection: a client must not use it for its next request.
        return problem_response(problem, 500, request.url.path, {"connection": "close"})


def invalid_parameter(error: dict[str, Any], path: str) -> Problem:
    """Return FastAPI's objection to a parameter of an address, for a person."""
    name = str(error["loc"][-1])
    limits = error.get("ctx", {})
    bound = limits.get("le", limits.get("ge"))
    value = "" if error["type"] == "missing" else f"; {str(error.get('input'))[:60]!r} is given"
    remedy = f"see {shell_word(name)} in /openapi.json"
    if bound is not None:
        remedy = f"set {shell_word(name)}={shell_word(bound)}"
    if error["type"] == "string_too_long":
        remedy = f"shorten {shell_word(name)} to {limits['max_length']:,} characters"
    return Problem(
        code="out-of-range",
        what=f"the parameter {name} cannot be taken",
        where=path,
        fact=f"{error['msg'][:1].lower()}{error['msg'][1:]}{value}",
        remedy=remedy,
    )
