"""The conversation of every agent: a question a line on its standard input, an answer a line on its
output, until the input ends.

Sent to a host as text with the agent's own: standard library only, written for Python 3.7.
Questions are `{"do": NAME, ...}`. An answer is what the function of that name returns, or
`{"error": text}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


def answer_questions(
    functions: Sequence[Callable[..., dict[str, Any]]],
    refused: tuple[type[Exception], ...] = (),
) -> None:
    """Answer questions by these functions until standard input ends. `hello` is answered without
    one, and errors of the kinds `refused` by `{"refused": text}`."""
    known = {function.__name__: function for function in functions}
    known["hello"] = dict
    for line in sys.stdin.buffer:
        question = json.loads(line.decode())
        try:
            answer = known[question.pop("do")](**question)
        except refused as error:
            answer = {"refused": getattr(error, "strerror", None) or str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
