"""A language model of the user's choice, behind an address of OpenAI's form.

Only the address that the user named is asked: no redirect is followed, and nothing that a document
or a question holds reaches it. The key comes from the environment, and is in no file, message or
log. An answer has a limit in time, however slowly it comes, and in bytes.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from farspan.domain.escapes import one_line
from farspan.domain.problems import Refusal
from farspan.retrieval.cited_answer import MAX_ANSWER_TOKENS, CitedAnswer, answer_question
from farspan.retrieval.search import Result

#: The variable with the endpoint's key.
KEY_VARIABLE = "FARSPAN_LLM_KEY"
MAX_COMPLETION_BYTES = 1_000_000
#: A connection that is not there within this time will not come.
LLM_CONNECT_S = 10.0
#: Of an error that the endpoint answers, this much is shown.
MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to ask which model. `url` ends before `/chat/completions`; `limit_s` is for all of an
    answer."""

    url: str
    model: str
    key: str | None = None
    limit_s: float = 60.0

    def __repr__(self) -> str:
        return f"Endpoint(url={self.url!r}, model={self.model!r})"


def find_endpoint(url: str, model: str, *, limit_s: float = 60.0) -> Endpoint:
    """Return the endpoint at an address, with the key of the environment.

    Raises Refusal (out-of-range) for an address that is none, or has a password in it.
    """
    parts = _split(url)
    has_more = parts is not None and bool(parts.query or parts.fragment)
    fact = ""
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        fact = "it is no address such as http://127.0.0.1:11434/v1"
    elif parts.username is not None or parts.password is not None:
        fact = "it has a user or a password in it"
    elif has_more or any(character.isspace() for character in url):
        fact = "it has more than a host and a path"
    if fact:
        raise Refusal(
            "out-of-range",
            what="the language model's address cannot be used",
            where="serve.llm",
            fact=fact,
            remedy=f"give the part before /chat/completions; a key goes into ${KEY_VARIABLE}",
            key="serve.llm.url",
        )
    key = os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise Refusal(
            "out-of-range",
            what="the language model's key fits no header",
            where=f"${KEY_VARIABLE}",
            fact="it has other characters than printable ASCII",
            remedy=f"export {KEY_VARIABLE}=...",
        )
    trimmed = url.rstrip("/").removesuffix("/chat/completions")
    return Endpoint(url=trimmed, model=model, key=key, limit_s=limit_s)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def complete_chat(endpoint: Endpoint, messages: list[dict[str, str]], *, tokens: int) -> str:
    """Return the model's answer to messages. Raises Refusal (llm-unusable)."""
    form = {
        "model": endpoint.model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": False,
    }
    status, body = _post(endpoint, json.dumps(form).encode())
    if not 200 <= status < 300:
        raise unusable(endpoint, f"it answered {status}{_shown_error(endpoint, body)}")
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise unusable(endpoint, "its answer is not one of a chat, as OpenAI's API has it")
    return text


def _post(endpoint: Endpoint, form: bytes) -> tuple[int, bytes]:
    """Return status and body of the endpoint's answer. Raises Refusal (llm-unusable)."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    path = f"{urlsplit(endpoint.url).path}/chat/completions"
    connection = _connection(endpoint)
    late = threading.Event()
    try:
        # http.client follows no redirect.
        connection.connect()
        with _deadline(connection, endpoint.limit_s, late):
            connection.request("POST", path, form, headers)
            response = connection.getresponse()
            body = response.read(MAX_COMPLETION_BYTES + 1)
            status = response.status
    except (OSError, http.client.HTTPException, ValueError) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            fact = f"there was no whole answer after {endpoint.limit_s:g} s"
            raise unusable(endpoint, fact) from None
        fact = one_line(str(error))[:MAX_SHOWN_CHARS] or type(error).__name__
        raise unusable(endpoint, _without_key(endpoint, fact)) from None
    finally:
        connection.close()
    if late.is_set():
        raise unusable(endpoint, f"there was no whole answer after {endpoint.limit_s:g} s")
    if len(body) > MAX_COMPLETION_BYTES:
        raise unusable(endpoint, f"its answer is longer than {MAX_COMPLETION_BYTES:,} bytes")
    return status, body


def _connection(endpoint: Endpoint) -> http.client.HTTPConnection:
    parts = urlsplit(endpoint.url)
    host = parts.hostname or ""
    timeout = min(LLM_CONNECT_S, endpoint.limit_s)
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout)
    return http.client.HTTPConnection(host, parts.port, timeout=timeout)


@contextmanager
def _deadline(
    connection: http.client.HTTPConnection, limit_s: float, late: threading.Event
) -> Iterator[None]:
    """Cut the connection after `limit_s`: a socket's own timeout starts again with every byte."""
    sock = connection.sock
    sock.settimeout(limit_s)

    def cut() -> None:
        late.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shown_error(endpoint: Endpoint, body: bytes) -> str:
    """Return the message of an error, as OpenAI's API and others have it; empty without one."""
    message: Any = None
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else error["message"]
    if not isinstance(message, str) or not message.strip():
        return ""
    return f": {_without_key(endpoint, one_line(message))[:MAX_SHOWN_CHARS]}"


def _without_key(endpoint: Endpoint, text: str) -> str:
    return text.replace(endpoint.key, "(the key)") if endpoint.key else text


def answer_from(endpoint: Endpoint, question: str, results: Sequence[Result]) -> CitedAnswer:
    """Return the endpoint's answer to a question from passages. Raises Refusal (llm-unusable)."""

    def complete(messages: list[dict[str, str]]) -> str:
        return complete_chat(endpoint, messages, tokens=MAX_ANSWER_TOKENS)

    return answer_question(question, results, complete, endpoint.model)


def no_llm(where: str) -> Refusal:
    return Refusal(
        "no-model",
        what="no language model was named that could answer",
        where=where,
        fact="serve.llm of run.yaml is left out, and so is --llm",
        remedy="farspan serve --llm http://127.0.0.1:11434/v1 --llm-model NAME",
    )


def unusable(endpoint: Endpoint, fact: str) -> Refusal:
    return Refusal(
        "llm-unusable",
        what="the language model does not answer as it should",
        where=f"{endpoint.url}, model {endpoint.model}",
        fact=fact,
        remedy=f"look whether it runs, its name, and ${KEY_VARIABLE}; searches work without it",
    )
