"""Requests and answers of OpenAI's API for text, as its clients send and read them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from farspan.retrieval.serve.forms import Usage

Finish = Literal["stop", "length"]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats share. `top_k` is an addition. Penalties, several answers and
    others that the model has no part for are taken only where they ask for nothing."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 50
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = 1
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: Literal[False] | None = None
    #: Taken as OpenAI's clients send them; nothing is done with them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class Complete(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model writes on after `prompt`."""

    prompt: str | list[str]
    best_of: Literal[1] | None = 1
    echo: Literal[False] | None = False


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class Chat(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model writes on after the messages, which are its prompt one after the other."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class TextUsage(Usage, frozen=True, kw_only=True):
    completion_tokens: int


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    finish_reason: Finish | None
    index: int = 0
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What the model wrote, or a piece of it."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: TextUsage | None = None


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    message: ChatReply
    finish_reason: Finish
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """What the model wrote after the messages of a chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    content: str | None = None
    role: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    delta: Delta
    finish_reason: Finish | None
    index: int = 0
    logprobs: None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: TextUsage | None = None
