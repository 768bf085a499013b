"""A run's index as a web application: a page to search in, and an API for programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.domain.config import IndexFolderConfig, RunConfig, ServeConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, load_yaml

if TYPE_CHECKING:
    from farspan.app.index_folders import IndexHome
    from farspan.retrieval.cited_answer import CitedAnswer
    from farspan.retrieval.llm_endpoint import Endpoint
    from farspan.retrieval.serve.run_searcher import IndexSearcher
    from farspan.retrieval.serve.site import Served
    from farspan.runtime.inference import Trained

#: The variable that may hold the token: other users see what a command is given.
TOKEN_VARIABLE = "FARSPAN_TOKEN"


def serve_index(
    home: IndexHome,
    progress: Progress = ignore_update,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    mcp: bool = False,
    llm: str | None = None,
    llm_model: str | None = None,
) -> None:
    """Serve the index of a run, or of a folder, until the process is asked to end. `token` may also
    be in $FARSPAN_TOKEN. With `mcp` also by the Model Context Protocol. `llm` and `llm_model` take
    the place of `serve.llm` and `serve.llm_model` of run.yaml or index.yaml.

    Raises Refusal, also for an address that others can reach without a token (out-of-range), and
    where another program listens there (port-taken).
    """
    try:
        from farspan.retrieval.serve.server import Address
        from farspan.retrieval.serve.server import serve as serve_at
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise Refusal(
            "extra-missing",
            what="the server needs a library that is not installed",
            where="farspan serve",
            fact=f"there is no module {error.name}",
            remedy=install_command("serve"),
        ) from None
    if mcp:
        require_mcp()
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    address = Address(run=home.path, host=host, port=port, token=token)
    report = note_reporter(progress)
    served = replace(describe_served(home), llm=named_llm(home, llm, llm_model))
    serve_at(address, served, lambda: open_searcher(home, report), report, mcp=mcp)


def named_llm(home: IndexHome, llm: str | None, llm_model: str | None) -> Endpoint | None:
    """Return the language model that was named, else the configuration's; None without one. Raises
    Refusal."""
    from farspan.retrieval.llm_endpoint import find_endpoint

    config = serve_config(home)
    url = llm or config.llm
    model = llm_model or config.llm_model
    if url is None:
        return None
    if model is None:
        raise Refusal(
            "usage",
            what="the language model has no name",
            where=f"serve.llm: {url}",
            fact="an endpoint has many models",
            remedy="add its name: --llm-model NAME, or serve.llm_model in run.yaml or index.yaml",
        )
    return find_endpoint(url, model)


def serve_config(home: IndexHome) -> ServeConfig:
    """Return how an index is served: by a run's run.yaml, or by index.yaml."""
    if isinstance(home, RunFolder):
        return load_yaml(home.config, RunConfig).serve
    return load_yaml(home.config, IndexFolderConfig).serve


def ask_home(
    home: IndexHome,
    question: str,
    progress: Progress = ignore_update,
    *,
    k: int | None = None,
    where: Mapping[str, Any] | Sequence[str] | None = None,
    llm: str | None = None,
    llm_model: str | None = None,
) -> CitedAnswer:
    """Return the answer of a language model to a question from the best passages. Raises
    Refusal, also (no-model) where none is named, and (llm-unusable)."""
    from farspan.app.indexing import search_home
    from farspan.retrieval.cited_answer import ASKED_PASSAGES, MAX_ASKED_PASSAGES
    from farspan.retrieval.llm_endpoint import answer_from, no_llm

    endpoint = named_llm(home, llm, llm_model)
    if endpoint is None:
        raise no_llm("farspan ask")
    passages = min(k or ASKED_PASSAGES, MAX_ASKED_PASSAGES)
    answer = search_home(home, question, passages, None, where, progress)
    return answer_from(endpoint, question, answer.results)


def serve_mcp(home: IndexHome, progress: Progress = ignore_update) -> None:
    """Answer a program that started this process, by the Model Context Protocol on standard input
    and output, until it closes them. Raises Refusal."""
    require_mcp()
    from farspan.retrieval.serve.mcp_server import serve_stdio

    report = note_reporter(progress)
    name = home.path.resolve().name
    serve_stdio(name, lambda: open_searcher(home, report, load_now=False))


def require_mcp() -> None:
    """Refuse (extra-missing) where the SDK of the Model Context Protocol is not installed."""
    try:
        import mcp.server.lowlevel  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refusal(
            "extra-missing",
            what="the Model Context Protocol needs a library that is not installed",
            where="farspan mcp",
            fact=f"there is no module {error.name}",
            remedy=install_command("mcp"),
        ) from None


def describe_served(home: IndexHome) -> Served:
    """Describe what is served, for the page and the API."""
    if isinstance(home, RunFolder):
        return _describe_run(home)
    from farspan.retrieval.serve.site import Served

    created = int(home.config.stat().st_mtime)
    return Served(name=home.path.resolve().name, report=None, created=created)


def _describe_run(run: RunFolder) -> Served:
    from farspan.domain.model import count_parameters
    from farspan.report.text import model_line
    from farspan.retrieval.serve.forms import ModelAbout, TextAbout
    from farspan.retrieval.serve.site import Served

    plan = run.load_plan()
    corpus = load(run.corpus, CorpusManifest)
    record = load(run.record, RunRecord)
    model = ModelAbout(
        line=model_line(plan), parameters=count_parameters(plan.model), context=plan.model.context
    )
    text = TextAbout(
        source=corpus.source,
        documents=corpus.train.documents + corpus.val.documents,
        bytes=corpus.train.text_bytes + corpus.val.text_bytes,
    )
    return Served(
        name=run.path.resolve().name,
        report=run.report,
        created=int(datetime.fromisoformat(record.created).timestamp()),
        model=model,
        text=text,
    )


def open_searcher(
    home: IndexHome, report: Callable[[str], None], *, load_now: bool = True
) -> IndexSearcher:
    """Open an index as it is now, with a run's model where it is of one; without `load_now` the
    model is loaded when it is needed first."""
    from farspan.app.indexing import open_index
    from farspan.retrieval.serve.run_searcher import IndexSearcher

    @cache
    def load_model() -> Trained:
        from farspan.runtime.inference import load as load_trained
        from farspan.runtime.inference import on_gpu

        assert isinstance(home, RunFolder)
        return on_gpu(load_trained(home), report)

    is_run = isinstance(home, RunFolder)
    trained = load_model() if load_now and is_run else None
    with ExitStack() as stack:
        index = stack.enter_context(open_index(home, trained=trained))
        if load_now:
            # A fault of a model shows now, not at the first search.
            _ = index.encoder
            if index.manifest.origin is not None:
                _ = index.own
        return IndexSearcher(index, load_model if is_run else None, stack.pop_all().close)
