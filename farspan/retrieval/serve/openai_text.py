"""Text by the run's model in the form of OpenAI's API: completions and chats, whole or as it is
written.

The model is a base model, which continues a text and knows no roles: the texts of a chat's
messages, in their order and with an empty line between them, are its prompt.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of functions inside
# functions.
import asyncio
import secrets
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from farspan.domain.escapes import escape_controls, shell_word
from farspan.domain.problems import Problem, Refusal
from farspan.retrieval.serve.openai_forms import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatReply,
    ChunkChoice,
    Complete,
    Completion,
    Delta,
    Finish,
    Sampling,
    TextChoice,
    TextUsage,
)
from farspan.retrieval.serve.refusals import HttpRefusal, json_response, openai_error
from farspan.retrieval.serve.schema import answers, takes
from farspan.retrieval.serve.searcher import Searcher, WrittenPiece
from farspan.retrieval.serve.site import ServedIndex, refuse_above

#: Tokens that are written unless `max_tokens` is given, as for `farspan generate`.
DEFAULT_TOKENS = 100
#: Texts that end an answer at most, as OpenAI has it.
MAX_STOPS = 4


class StopFilter:
    """Ends a text before the first of `stops`; what may begin one is held back."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._pending = ""
        self.stopped = False

    def add(self, text: str, *, last: bool = False) -> str:
        """Return the text that can be shown once `text` has come."""
        self._pending += text
        places = [self._pending.find(stop) for stop in self._stops]
        reached = [place for place in places if place >= 0]
        if reached:
            self.stopped = True
            shown = self._pending[: min(reached)]
            self._pending = ""
            return shown
        kept = 0 if last else self._kept_chars()
        shown = self._pending[: len(self._pending) - kept]
        self._pending = self._pending[len(shown) :]
        return shown

    def _kept_chars(self) -> int:
        """Return the length of the longest end that a stop begins with."""
        longest = max(map(len, self._stops), default=0)
        for length in range(min(longest - 1, len(self._pending)), 0, -1):
            end = self._pending[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A part of an answer: its text, the reason of its end, and the tokens so far."""

    text: str
    finish: Finish | None
    usage: TextUsage


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How an answer is written down: for completions or for chats."""

    prefix: str
    whole: Callable[[str, int, str, Draft], msgspec.Struct]
    #: One part of it as it is written; the first begins it.
    part: Callable[[str, int, str, Draft, bool], msgspec.Struct]
    usage: Callable[[str, int, str, TextUsage], msgspec.Struct]


def text_routes(site: ServedIndex) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post(
        "/completions",
        response_class=Response,
        responses={200: answers(Completion)},
        openapi_extra=takes(Complete),
        summary="Let the model write after a prompt",
    )
    async def completions(request: Request) -> Response:
        form = await site.parse_body(request, Complete)
        prompts = [form.prompt] if isinstance(form.prompt, str) else form.prompt
        refuse_above(len(prompts), 1, "prompts", "POST /v1/completions, key prompt")
        prompt = prompts[0] if prompts else ""
        return await _answer(site, form, prompt, form.max_tokens, COMPLETIONS)

    @router.post(
        "/chat/completions",
        response_class=Response,
        responses={200: answers(ChatCompletion)},
        openapi_extra=takes(Chat),
        summary="Let the model write after the messages of a chat",
    )
    async def chat(request: Request) -> Response:
        form = await site.parse_body(request, Chat)
        prompt = "\n\n".join(message.text for message in form.messages)
        tokens = form.max_completion_tokens or form.max_tokens
        return await _answer(site, form, prompt, tokens, CHATS)

    return router


def check_model(site: ServedIndex, model: str, place: str) -> None:
    """Raise HttpRefusal (404) for another model than the run's."""
    if model != site.served.name:
        raise HttpRefusal(
            404,
            "usage",
            what=f"there is no model {model[:80]!r}",
            where=f"{place}, key model",
            fact=f"the model of this server is {site.served.name}",
            remedy=f"set model to {shell_word(site.served.name)}",
        )


async def _answer(
    site: ServedIndex, form: Sampling, prompt: str, tokens: int | None, shape: Shape
) -> Response:
    place = "POST /v1"
    check_model(site, form.model, place)
    limits = site.limits
    refuse_above(tokens or 1, limits.tokens, "tokens", f"{place}, key max_tokens")
    refuse_above(len(prompt), limits.prompt_chars, "characters", f"{place}, the prompt")
    stops = [form.stop] if isinstance(form.stop, str) else form.stop or []
    refuse_above(len(stops), MAX_STOPS, "texts to stop at", f"{place}, key stop")
    stops = [stop for stop in stops if stop]
    most = tokens or min(DEFAULT_TOKENS, limits.tokens)
    enough = threading.Event()

    temperature = 1.0 if form.temperature is None else form.temperature
    seed = secrets.randbits(31) if form.seed is None else form.seed % 2**63

    def write(searcher: Searcher) -> Iterator[Draft]:
        pieces = searcher.write(
            prompt, most, temperature, form.top_k, form.top_p or 1.0, seed, enough.is_set
        )
        return cut_at_stops(pieces, stops)

    head = (f"{shape.prefix}-{secrets.token_hex(12)}", int(time.time()), form.model)
    if form.stream:
        parts = await _start_writing(site, write, enough)
        usage = form.stream_options is not None and form.stream_options.include_usage
        events = _events(parts, head, shape, usage)
        return StreamingResponse(events, media_type="text/event-stream")
    try:
        drafts = await site.ask(lambda searcher: list(write(searcher)), site.writing)
    finally:
        # Nobody waits any longer: for lack of time, or as the server ends.
        enough.set()
    text = "".join(draft.text for draft in drafts)
    whole = Draft(text=text, finish=drafts[-1].finish, usage=drafts[-1].usage)
    return json_response(shape.whole(*head, whole))


def cut_at_stops(pieces: Iterator[WrittenPiece], stops: list[str]) -> Iterator[Draft]:
    """Yield the parts of a text up to the first stop; the last of them has the reason of its
    end."""
    stop_filter = StopFilter(stops)
    last = WrittenPiece("", 0, 0)
    for last in pieces:
        text = stop_filter.add(last.text)
        if stop_filter.stopped:
            yield Draft(text=text, finish="stop", usage=usage_of(last))
            return
        if text:
            yield Draft(text=text, finish=None, usage=usage_of(last))
    rest = stop_filter.add("", last=True)
    finish: Finish = "stop" if last.ended or stop_filter.stopped else "length"
    yield Draft(text=rest, finish=finish, usage=usage_of(last))


def usage_of(piece: WrittenPiece) -> TextUsage:
    return TextUsage(
        prompt_tokens=piece.prompt_tokens,
        completion_tokens=piece.tokens,
        total_tokens=piece.prompt_tokens + piece.tokens,
    )


async def _start_writing(
    site: ServedIndex, write: Callable[[Searcher], Iterator[Draft]], enough: threading.Event
) -> AsyncIterator[Draft]:
    """Return the parts of a text as they come; a refusal before the first of them is raised
    here."""
    queue: asyncio.Queue[Draft | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def work(searcher: Searcher) -> None:
        for draft in write(searcher):
            loop.call_soon_threadsafe(queue.put_nowait, draft)
            if enough.is_set():
                return

    task = asyncio.ensure_future(site.ask(work, site.writing))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        first = await queue.get()
    except BaseException:
        enough.set()
        task.cancel()
        raise
    if first is None:
        await task

    async def parts() -> AsyncIterator[Draft]:
        draft = first
        try:
            while draft is not None:
                yield draft
                draft = await queue.get()
            await task
        finally:
            # The client has gone, or has all of it.
            enough.set()
            task.cancel()

    return parts()


async def _events(
    parts: AsyncIterator[Draft], head: tuple[str, int, str], shape: Shape, with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the events of a text as it is written. What fails in the middle is an event too."""
    is_first = True
    usage = None
    try:
        async for draft in parts:
            yield _event(shape.part(*head, draft, is_first))
            is_first = False
            usage = draft.usage
    except Exception as error:
        yield _event(openai_error(_problem_of(error), 500))
        return
    if with_usage and usage is not None:
        yield _event(shape.usage(*head, usage))
    yield b"data: [DONE]\n\n"


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _problem_of(error: Exception) -> Problem:
    if isinstance(error, Refusal):
        return error.problem
    # The person that runs the server sees where it was, a client does not.
    lines = traceback.format_exception(error)
    print(escape_controls("".join(lines)), end="", file=sys.stderr)
    return Problem(
        code="fault",
        what="the text breaks off",
        where="POST /v1",
        fact=type(error).__name__,
        remedy="ask again, for less",
    )


def _whole_completion(id: str, created: int, model: str, draft: Draft) -> Completion:
    choice = TextChoice(text=draft.text, finish_reason=draft.finish)
    return Completion(id=id, created=created, model=model, choices=[choice], usage=draft.usage)


def _part_of_completion(
    id: str, created: int, model: str, draft: Draft, is_first: bool
) -> Completion:
    choice = TextChoice(text=draft.text, finish_reason=draft.finish)
    return Completion(id=id, created=created, model=model, choices=[choice])


def _usage_of_completion(id: str, created: int, model: str, usage: TextUsage) -> Completion:
    return Completion(id=id, created=created, model=model, choices=[], usage=usage)


def _whole_chat(id: str, created: int, model: str, draft: Draft) -> ChatCompletion:
    finish = draft.finish or "length"
    choice = ChatChoice(message=ChatReply(content=draft.text), finish_reason=finish)
    return ChatCompletion(id=id, created=created, model=model, choices=[choice], usage=draft.usage)


def _part_of_chat(id: str, created: int, model: str, draft: Draft, is_first: bool) -> ChatChunk:
    role = "assistant" if is_first else None
    choice = ChunkChoice(delta=Delta(content=draft.text, role=role), finish_reason=draft.finish)
    return ChatChunk(id=id, created=created, model=model, choices=[choice])


def _usage_of_chat(id: str, created: int, model: str, usage: TextUsage) -> ChatChunk:
    return ChatChunk(id=id, created=created, model=model, choices=[], usage=usage)


COMPLETIONS = Shape(
    prefix="cmpl", whole=_whole_completion, part=_part_of_completion, usage=_usage_of_completion
)
CHATS = Shape(prefix="chatcmpl", whole=_whole_chat, part=_part_of_chat, usage=_usage_of_chat)
