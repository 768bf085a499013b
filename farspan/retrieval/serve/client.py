"""A search asked of the run's own server, which has model and index open.

Only loopback is asked, and nothing is retried: without an answer one opens the index oneself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from farspan.domain.decoding import decode_json
from farspan.retrieval.hybrid_ranking import System
from farspan.retrieval.search import Answer
from farspan.retrieval.serve.server_info import find_server

#: A server that is busy is not waited for longer than opening the index takes.
SERVER_ANSWER_S = 5.0
_MOST_BYTES = 1 << 24
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def ask(
    run: Path,
    query: str,
    k: int,
    system: System | None,
    where: Mapping[str, Any] | Sequence[str],
) -> Answer | None:
    """Return the answer of the server of the run at `run`; None where there is none, or it does not
    answer so in time."""
    address = find_server(run)
    if address is None:
        return None
    # Most searches find no server, and need not wait for these.
    import urllib.parse
    import urllib.request

    url, token = address
    if urllib.parse.urlsplit(url).hostname not in LOOPBACK:
        return None
    form = {"q": query, "k": k, "system": system, "where": where}
    request = urllib.request.Request(
        f"{url}/api/search", headers={"Content-Type": "application/json"}
    )
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    # No proxy: the server is on this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request.data = msgspec.json.encode(form)
        with opener.open(request, timeout=SERVER_ANSWER_S) as answer:
            return decode_json(answer.read(_MOST_BYTES), Answer)
    except (OSError, ValueError, msgspec.MsgspecError):
        # Also a refusal: what is wrong with the search is found again, and a full queue is no
        # reason not to search.
        return None
