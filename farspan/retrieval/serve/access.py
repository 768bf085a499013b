"""The token: in a header for programs, in a cookie for the page."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.security import HTTPBearer
from starlette.responses import RedirectResponse, Response

from farspan.retrieval.serve.guard import PAGE_POLICY, TOKENS_KEY, Entrance
from farspan.retrieval.serve.refusals import HttpRefusal

Check = Callable[[Request], Coroutine[Any, Any, None]]


class TokenMissing(HttpRefusal):
    """The request has no token, or another one."""

    def __init__(self, path: str) -> None:
        super().__init__(
            401,
            "usage",
            what="the server wants its token",
            where=path[:80],
            fact="there is none, or another",
            remedy="send the header Authorization: Bearer TOKEN",
            headers={"www-authenticate": "Bearer"},
        )


def token_check(entrance: Entrance) -> Check:
    """Return a dependency that raises TokenMissing for a request without the token."""
    bearer = HTTPBearer(auto_error=False)

    async def check(request: Request) -> None:
        if entrance.token is None:
            return
        credentials = await bearer(request)
        cookies = request.scope[TOKENS_KEY]
        tokens = cookies if credentials is None else [credentials.credentials]
        if not any(entrance.is_token(token) for token in tokens):
            raise TokenMissing(request.url.path)

    return check


def locked_page(request: Request, refusal: TokenMissing, page: bytes) -> Response:
    """Return the page without the run for a browser, and the problem for a program."""
    if "text/html" not in request.headers.get("accept", ""):
        return refusal.response(request.url.path)
    headers = {"www-authenticate": "Bearer", "content-security-policy": PAGE_POLICY}
    return Response(page, 401, headers, "text/html")


def accept_link(request: Request, entrance: Entrance) -> Response | None:
    """Return the answer to the page's address with the token: a cookie, and the bare address."""
    parameters = request.query_params.multi_items()
    tokens = [value for name, value in parameters if name == "token"]
    if entrance.token is None or not tokens or not entrance.is_token(tokens[0]):
        return None
    rest = urlencode([pair for pair in parameters if pair[0] != "token"])
    response = RedirectResponse(f"/?{rest}" if rest else "/", 303)
    response.set_cookie(entrance.cookie, tokens[0], httponly=True, samesite="strict")
    return response
