"""What one server takes on: sizes, times, and how many requests wait."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    body_bytes: int = 1_000_000
    #: Of the first line and the headers: a query of `query_chars` fits in any script.
    head_bytes: int = 32_000
    query_chars: int = 2_000
    prompt_chars: int = 8_000
    #: Results at once, and how deep paging goes.
    k: int = 100
    offset: int = 10_000
    #: Texts of one request for vectors, and tokens to write at most.
    batch: int = 256
    tokens: int = 512
    #: Threads that search, and threads that write and embed; requests that may wait for each.
    searching: int = 1
    writing: int = 1
    searching_waiting: int = 32
    writing_waiting: int = 4
    #: How long a search may take with its waiting, and how long what the second kind of threads
    #: does.
    search_s: float = 30.0
    write_s: float = 120.0
    #: Questions that a language model answers at once, those that may wait, and its time for one.
    asking: int = 4
    asking_waiting: int = 16
    ask_s: float = 60.0
    #: How long the head of a request may take to come, and how long its body.
    head_s: float = 10.0
    body_s: float = 10.0
    #: How often it is looked whether there is a new index; after one that could not be opened, how
    #: much later again.
    look_s: float = 1.0
    retry_s: float = 30.0
    #: What runs when the server is asked to end has so long.
    end_s: float = 5.0
    #: Connections at once; more are turned away.
    connections: int = 256
