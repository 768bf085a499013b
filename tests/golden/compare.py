"""Where a dump differs from an older one.

Between trees on one machine all numbers are compared to the last bit or to `rel`. Between kinds of
processors kernels add up in other orders: there `loose` takes the tolerances that the dump names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any


def differences(
    old: Any, new: Any, rel: float, at: str = "", *, loose: bool = False
) -> Iterator[str]:
    """Lines that each name a place and what stands there. Entries may have been added.

    Three objects are read by their one key: `keys` holds types and keys of a JSON value as text, in
    which none may have been added; `answers` the results of a search; and `bits` a number in
    hexadecimal with the `rel` or `abs` that `loose` allows.
    """
    match old, new:
        case {"keys": str() as before}, {"keys": str() as after}:
            yield from _other_keys(json.loads(before), json.loads(after), at, loose)
        case {"answers": [*before]}, {"answers": [*after]}:
            yield from _other_answers(before, after, rel, at, loose)
        case {"bits": str()}, {"bits": str()}:
            if not _same_number(old, new, loose):
                a, b = (float.fromhex(one["bits"]) for one in (old, new))
                yield f"{at}: {a!r} and now {b!r}, {abs(b - a):.1e} apart"
        case dict(), dict():
            for key, part in old.items():
                if key in new:
                    yield from differences(part, new[key], rel, f"{at}.{key}", loose=loose)
                else:
                    yield f"{at}.{key} is gone"
        case list(), list():
            if len(old) != len(new):
                yield f"{at}: {len(old)} and now {len(new)}"
            for index, (a, b) in enumerate(zip(old, new, strict=False)):
                yield from differences(a, b, rel, f"{at}[{index}]", loose=loose)
        case float(), int() | float() if not isinstance(new, bool):
            if not math.isclose(old, new, rel_tol=rel, abs_tol=1e-300):
                yield f"{at}: {old!r} and now {new!r}"
        case _:
            if old != new or type(old) is not type(new):
                yield f"{at}: {old!r} and now {new!r}"


def _same_number(old: dict[str, Any], new: dict[str, Any], loose: bool) -> bool:
    if not loose:
        return bool(old["bits"] == new["bits"])
    a, b = (float.fromhex(one["bits"]) for one in (old, new))
    return math.isclose(a, b, rel_tol=old.get("rel", 0.0), abs_tol=old.get("abs", 0.0))


def _other_keys(old: dict[str, Any], new: dict[str, Any], at: str, loose: bool) -> Iterator[str]:
    """Types and keys that are gone or new. `loose`: what one of two machines lacks is null or an
    empty list there."""
    before = set(old)
    after = set(new)
    if loose:
        before = before - {"null"}
        after = after - {"null"}
        if not before or not after:
            return
    for type_ in sorted(before - after):
        yield f"{at}: type {type_} is gone"
    for type_ in sorted(after - before):
        yield f"{at}: type {type_} is new"
    if "array" in before & after:
        yield from _other_keys(old["array"], new["array"], f"{at}[]", loose)
    if "object" in before & after:
        fields = old["object"]
        now = new["object"]
        for key in sorted({*fields, *now}):
            if key not in now:
                yield f"{at}.{key} is gone"
            elif key not in fields:
                yield f"{at}.{key} is new"
            else:
                yield from _other_keys(fields[key], now[key], f"{at}.{key}", loose)


def _other_answers(
    old: list[Any], new: list[Any], rel: float, at: str, loose: bool
) -> Iterator[str]:
    """Results in another order or with other scores; `loose`, those of equal scores may change
    places."""
    if len(old) != len(new):
        yield f"{at}: {len(old)} results and now {len(new)}"
    before = {result["id"]: result["score"] for result in old}
    for rank, (a, b) in enumerate(zip(old, new, strict=False)):
        yield from differences(a["score"], b["score"], rel, f"{at}[{rank}].score", loose=loose)
        if a["id"] == b["id"]:
            continue
        # The last one may have had an equal beyond the end of the list.
        equal = _same_number(before.get(b["id"], old[-1]["score"]), a["score"], loose=True)
        if not (loose and equal):
            yield f"{at}[{rank}]: {a['id']} and now {b['id']}"
