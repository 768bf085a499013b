"""Refusals as HTTP answers: a status, and the problem as JSON. No answer holds a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from farspan.domain.escapes import shell_word
from farspan.domain.problems import Problem, Refusal

#: Of the codes that a request can be refused with; other codes are about the server's own files.
STATUS = {
    "usage": 422,
    "out-of-range": 422,
    "unknown-key": 422,
    "file-unreadable": 400,
    "run-busy": 503,
}
UNAVAILABLE = 503


class Trouble(msgspec.Struct, frozen=True):
    """What every refusal is as JSON; its fields say what was refused, where, why, and what mends
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


class Turned(Exception):
    """A request that is turned away with a status of its own."""

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
        self.status, self.headers = status, dict(headers or {})
        self.problem = Problem(code=code, what=what, where=where, fact=fact, remedy=remedy)
        super().__init__(what)


def json_answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def problem_answer(
    problem: Problem, status: int, path: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A problem as JSON; under /v1 with what OpenAI's clients look for beside it."""
    if not path.startswith("/v1/"):
        return json_answer(Trouble(problem), status, headers)
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = f"{problem.what} ({problem.where}): {problem.fact}; {problem.remedy}"
    error = OpenAIError(message=message, type=kind, code=problem.code)
    return json_answer(OpenAITrouble(error, problem), status, headers)


def refusal_answer(refusal: Refusal, path: str) -> Response:
    code = refusal.problem.code
    return problem_answer(refusal.problem, STATUS.get(code, UNAVAILABLE), path)


def invalid(errors: list[dict[str, Any]], place: str) -> Problem:
    """What FastAPI finds wrong with the parameters of an address, for a person: of several the
    first."""
    error = errors[0]
    name = str(error["loc"][-1])
    limits = error.get("ctx", {})
    wanted = next((limits[key] for key in ("le", "ge") if key in limits), None)
    given = "" if error["type"] == "missing" else f"; {str(error.get('input'))[:60]!r} is given"
    remedy = f"see {shell_word(name)} in /openapi.json"
    if wanted is not None:
        remedy = f"set {shell_word(name)}={shell_word(wanted)}"
    if error["type"] == "string_too_long":
        remedy = f"shorten {shell_word(name)} to {limits['max_length']:,} characters"
    return Problem(
        code="out-of-range",
        what=f"the parameter {name} cannot be taken",
        where=place,
        fact=f"{error['msg'][:1].lower()}{error['msg'][1:]}{given}",
        remedy=remedy,
    )
