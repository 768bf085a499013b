"""A run's index as a web application: a page to search in, and an API for programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING

from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.domain.corpus import CorpusManifest
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load

if TYPE_CHECKING:
    from farspan.app.indexing import IndexHome
    from farspan.retrieval.serve.run_searcher import IndexSearcher
    from farspan.retrieval.serve.site import Served

#: The variable that may hold the token: other users see what a command is given.
TOKEN_VARIABLE = "FARSPAN_TOKEN"


def serve_index(
    home: IndexHome,
    progress: Progress = ignore_update,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
) -> None:
    """Serve the index of a run, or of a folder, until the process is asked to end. `token` may also
    be in $FARSPAN_TOKEN.

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
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    address = Address(run=home.path, host=host, port=port, token=token)
    report = note_reporter(progress)
    serve_at(address, describe_served(home), lambda: open_searcher(home, report), report)


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


def open_searcher(home: IndexHome, report: Callable[[str], None]) -> IndexSearcher:
    """Open an index as it is now, with a run's model where it is of one."""
    from farspan.app.indexing import open_index
    from farspan.retrieval.serve.run_searcher import IndexSearcher

    trained = None
    if isinstance(home, RunFolder):
        from farspan.runtime.inference import load as load_model
        from farspan.runtime.inference import on_gpu

        trained = on_gpu(load_model(home), report)
    with ExitStack() as stack:
        index = stack.enter_context(open_index(home, trained=trained))
        return IndexSearcher(index, trained, stack.pop_all().close)
