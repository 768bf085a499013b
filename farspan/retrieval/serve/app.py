"""The web application of a site."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager

from fastapi import Depends, FastAPI, Request
from starlette.middleware import Middleware
from starlette.responses import Response

from farspan._version import __version__
from farspan.retrieval.serve.access import TokenMissing, locked_page, token_check
from farspan.retrieval.serve.guard import Entrance, Guard
from farspan.retrieval.serve.openai import openai_routes
from farspan.retrieval.serve.openai_text import text_routes
from farspan.retrieval.serve.page import read_files
from farspan.retrieval.serve.refusals import handle_errors, json_response
from farspan.retrieval.serve.routes import api_routes, page_routes, static_routes
from farspan.retrieval.serve.schema import error_answers, openapi_document
from farspan.retrieval.serve.site import ServedIndex


def create_app(
    site: ServedIndex,
    entrance: Entrance,
    announced: Callable[[], AbstractContextManager[object]],
    *,
    mcp: bool = False,
) -> FastAPI:
    """Return the application of a site; `announced` lasts as long as it accepts requests.

    With `mcp` it also has the address of the Model Context Protocol.
    """
    check_token = token_check(entrance)
    files = read_files(site.served.name)
    endpoint = None
    mcp_routes = []
    if mcp:
        from farspan.retrieval.serve.mcp_routes import mcp_route

        route, endpoint = mcp_route(site, check_token)
        mcp_routes.append(route)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if endpoint is not None:
                await stack.enter_async_context(endpoint.manager.run())
            stack.enter_context(announced())
            yield

    app = FastAPI(
        title=f"farspan: {site.served.name}",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses=error_answers(),
        lifespan=lifespan,
        middleware=[Middleware(Guard, entrance=entrance, limits=site.limits)],
    )
    token_needed = [Depends(check_token)]
    app.include_router(static_routes(files))
    app.include_router(page_routes(site, files, entrance, check_token))
    app.include_router(api_routes(site), dependencies=token_needed)
    app.include_router(openai_routes(site), dependencies=token_needed)
    app.include_router(text_routes(site), dependencies=token_needed)
    app.router.routes.extend(mcp_routes)

    @app.get("/openapi.json", include_in_schema=False, dependencies=token_needed)
    async def openapi() -> Response:
        return json_response(openapi_document(app, needs_token=entrance.token is not None))

    handle_errors(app, check_token)

    @app.exception_handler(TokenMissing)
    def refuse_without_token(request: Request, refusal: TokenMissing) -> Response:
        return locked_page(request, refusal, files.locked)

    return app
