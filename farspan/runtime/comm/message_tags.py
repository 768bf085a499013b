"""The channels of messages between workers: a tag is a channel and a count, so that no two kinds
share one."""

from __future__ import annotations

from enum import IntEnum

#: Counts of a channel; one returns long after its last message has arrived.
MESSAGES = 2**20
#: Channels are below this; what a worker relays inside its site has its channel this much higher.
INSIDE = 512


class MessageChannel(IntEnum):
    #: Gradients whose sums are divided over the data axis, and sums between sites.
    SCATTER = 1
    ACROSS = 2
    #: Between stages: forward, backward, and the forward passes of a validation.
    ACTIVATIONS = 3
    GRADIENTS = 4
    EVALUATED = 5
    #: Norms and losses of a step, and what is decided between steps.
    TOTALS = 12
    DECISIONS = 18
    #: Gradients of a table that both ends of a pipeline hold.
    HEAD = 13
    EMBEDDING = 14
    #: Pieces of the full state, to and from rank 0, and from it to workers that do not see its
    #: checkpoints.
    FULL_STATE = 17
    HANDED_OUT = 19
    #: Changes of a replica: one channel for each that sends, from here on.
    OUTER = 32


def tag(channel: int, count: int, *, inside: bool = False) -> int:
    """Return the tag of a channel's message number `count`, or of the one that is relayed inside a
    site."""
    if inside:
        channel += INSIDE
    return channel * MESSAGES + count % MESSAGES
