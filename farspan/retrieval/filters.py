"""Filters of a search: which documents have certain values in their fields.

A field's values are texts, and what they mean is read from them: a number, true or false, an ISO
date, or a text. A condition is written as JSON (`{"year": {"gte": 2020}, "lang": ["de", "en"]}`) or
as text (`year>=2020`, `lang=de,en`, `date=2021-01..2021-06`). A document and each of its exact
copies have values of their own; all conditions must hold at one of these places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import Place
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise
from farspan.retrieval.passages import IndexedDocument
from farspan.retrieval.stores import FIELD

Bound = Literal["gt", "gte", "lt", "lte"]
BOUNDS: dict[str, Bound] = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}
#: What callers give: JSON values by field, or texts such as `year>=2020`.
Where: TypeAlias = "Filters | Mapping[str, Any] | Sequence[str] | None"
#: Conditions of one search at most, and values of one condition.
MAX_CONDITIONS = 32
MAX_CONDITION_VALUES = 1_000
#: A longer text is no number and no date.
MAX_READ_CHARS = 64

#: As JSON has numbers: 007 is a text.
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_DATE = re.compile(
    r"([0-9]{4})(?:-([0-9]{2})(?:-([0-9]{2})"
    r"(?:[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,6})[0-9]*)?)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?)?)?)?"
)
_CONDITION = re.compile(r"(.+?)(>=|<=|!=|=|>|<)(.*)", re.DOTALL)
_WHERE = "the filter of a search"


@dataclass(frozen=True, kw_only=True)
class Value:
    """A text, and what it can be read as. A date is a span: from its first moment to that after its
    last."""

    text: str
    number: Decimal | None = None
    flag: bool | None = None
    date: tuple[datetime, datetime] | None = None

    def comparable(self, other: Value) -> bool:
        """Whether one of the two can be less than the other."""
        if self.number is not None and other.number is not None:
            return True
        return self.date is not None and other.date is not None

    def equals(self, other: Value) -> bool:
        """Compare the texts, and what they are read as. A date equals `other` within whose span it
        lies: 2021-05-03 equals 2021-05."""
        if self.text == other.text:
            return True
        if self.flag is not None and self.flag == other.flag:
            return True
        if self.number is not None and other.number is not None:
            return self.number == other.number
        if self.date is None or other.date is None:
            return False
        return other.date[0] <= self.date[0] and self.date[1] <= other.date[1]

    def within(self, bound: Bound, other: Value) -> bool:
        """Compare by order; of dates, the whole span must lie there."""
        if self.number is not None and other.number is not None:
            sides = (self.number, other.number)
        elif self.date is None or other.date is None:
            return False
        elif bound == "gt":
            return self.date[0] >= other.date[1]
        elif bound == "gte":
            return self.date[0] >= other.date[0]
        elif bound == "lt":
            return self.date[1] <= other.date[0]
        else:
            return self.date[1] <= other.date[1]
        have, limit = sides
        results = {
            "gt": have > limit,
            "gte": have >= limit,
            "lt": have < limit,
            "lte": have <= limit,
        }
        return results[bound]


@lru_cache(maxsize=65_536)
def read_value(text: str) -> Value:
    """Read what a text means."""
    word = text.strip()
    if not word or len(word) > MAX_READ_CHARS:
        return Value(text=text)
    flag = {"true": True, "false": False}.get(word.lower())
    number = Decimal(word) if _NUMBER.fullmatch(word) else None
    return Value(text=text, number=number, flag=flag, date=_read_date(word))


def _read_date(word: str) -> tuple[datetime, datetime] | None:
    """Return the span of an ISO date, such as that of a whole month; None for another text.

    A time without a zone is taken as UTC.
    """
    match = _DATE.fullmatch(word)
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        day_start = datetime(int(year), int(month or 1), int(day or 1))
        microseconds = int((fraction or "0").ljust(6, "0"))
        start = day_start.replace(
            hour=int(hour or 0),
            minute=int(minute or 0),
            second=int(second or 0),
            microsecond=microseconds,
        )
        if zone:
            start = _as_utc(start, zone)
    except (ValueError, OverflowError):
        return None
    try:
        return start, _end_of_span(start, month, day, minute, second, fraction)
    except (ValueError, OverflowError):  # The last year that there is.
        return start, datetime.max


def _as_utc(local: datetime, zone: str) -> datetime:
    if zone == "Z":
        return local
    hours = int(zone[1:3])
    minutes = int(zone[-2:])
    if hours > 23 or minutes > 59:
        raise ValueError(zone)
    offset = timedelta(hours=hours, minutes=minutes)
    aware = local.replace(tzinfo=timezone(offset if zone[0] == "+" else -offset))
    return aware.astimezone(UTC).replace(tzinfo=None)


def _end_of_span(
    start: datetime,
    month: str | None,
    day: str | None,
    minute: str | None,
    second: str | None,
    fraction: str | None,
) -> datetime:
    """Return the moment after the span; what was not given is the whole of it."""
    if month is None:
        return start.replace(year=start.year + 1)
    if day is None:
        years, months = divmod(start.month, 12)
        return start.replace(year=start.year + years, month=months + 1)
    if minute is None:
        return start + timedelta(days=1)
    if second is None:
        return start + timedelta(minutes=1)
    return start + (timedelta(microseconds=1) if fraction else timedelta(seconds=1))


@dataclass(frozen=True, kw_only=True)
class Test:
    """One alternative of a condition: a value to equal, or bounds to lie within. `typed`: the value
    was a number or true or false, which a text can never equal."""

    equal: Value | None = None
    bounds: tuple[tuple[Bound, Value], ...] = ()
    typed: bool = False

    def passes(self, value: Value) -> bool:
        if self.equal is not None:
            return value.equals(self.equal)
        return all(value.within(bound, limit) for bound, limit in self.bounds)

    def can_compare(self, value: Value) -> bool:
        """Whether a value is of the kind that this compares."""
        if self.equal is None:
            return all(value.comparable(limit) for _, limit in self.bounds)
        if not self.typed:
            return True
        if self.equal.flag is not None:
            return value.flag is not None
        return value.comparable(self.equal)

    @property
    def operand(self) -> Value:
        return self.equal if self.equal is not None else self.bounds[0][1]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What a field must hold: one of `tests`, or none of them if `negated`.

    `literal`: where a document has exactly this text there, only the text is meant; `a, b` may be a
    title.
    """

    field: str
    tests: tuple[Test, ...]
    negated: bool = False
    literal: str | None = None

    def matching(self, values: Iterable[str | None]) -> frozenset[str]:
        """Return those of a field's values that pass, before negation.

        Raises Refusal (out-of-range) where no value is of the kind that is compared.
        """
        distinct = frozenset(text for text in values if text is not None)
        if self.literal is not None and self.literal in distinct:
            return frozenset((self.literal,))
        read = [read_value(text) for text in sorted(distinct)]
        for test in self.tests:
            if read and not any(map(test.can_compare, read)):
                raise _refuse_kind(self.field, test, read)
        passing = []
        for value in read:
            if any(test.passes(value) for test in self.tests):
                passing.append(value.text)
        return frozenset(passing)

    def passing(self, column: Sequence[str | None], texts: frozenset[str]) -> npt.NDArray[np.bool_]:
        """Return which values of a column pass; `texts` are those that match."""
        passing = [(text in texts) != self.negated for text in column]
        return np.array(passing, bool)


@dataclass(frozen=True, kw_only=True)
class Bindings:
    """Filters at a set of documents.

    `payload`: the fields and values by which a store finds the same passages, of documents without
    copies; None where it cannot.
    """

    mask: npt.NDArray[np.bool_]
    payload: dict[str, str] | None

    def narrow(self, among: npt.NDArray[np.bool_]) -> Bindings:
        """Return the bindings for those that are also `among` these."""
        return Bindings(mask=self.mask & among, payload=None)


@dataclass(frozen=True)
class Filters:
    """Conditions that must all hold; without any, every document passes."""

    conditions: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.conditions)

    @classmethod
    def parse(cls, where: Where) -> Filters:
        """Return the filters of JSON values by field, or of texts such as `year>=2020`.

        Raises Refusal (usage, out-of-range) for a condition that cannot be read.
        """
        if isinstance(where, Filters):
            return where
        if isinstance(where, str):
            where = [where]
        conditions: list[Condition] = []
        if isinstance(where, Mapping):
            for name, value in where.items():
                conditions += _read_json(str(name), value)
        else:
            conditions += [parse_text(text) for text in where or ()]
        if len(conditions) > MAX_CONDITIONS:
            raise _refuse(
                "out-of-range",
                "there are too many conditions",
                f"{len(conditions)}; at most {MAX_CONDITIONS}",
                "give several values of a field in one: lang=de,en",
            )
        _refuse_twice(conditions)
        return cls(tuple(conditions))

    def check_fields(self, fields: Sequence[str]) -> None:
        """Raise Refusal (usage) for a field that is not among `fields`."""
        for condition in self.conditions:
            if condition.field not in fields:
                raise unknown_field(condition.field, tuple(fields))

    def mask(self, documents: Sequence[IndexedDocument]) -> npt.NDArray[np.bool_]:
        """Return which documents (N) pass, at one of their places."""
        return self.bind(documents).mask

    def bind(self, documents: Sequence[IndexedDocument]) -> Bindings:
        """Return which documents pass, and whether a store can find their passages.

        Raises Refusal (out-of-range) where a field has no value that can be compared.
        """
        owners: list[int] = []
        copies: list[Place] = []
        for row, document in enumerate(documents):
            if document.places:
                owners += [row] * len(document.places)
                copies += document.places
        passing_N = np.ones(len(documents), bool)
        copies_M = np.ones(len(copies), bool)
        matching = []
        for condition in self.conditions:
            own = _column(documents, condition.field)
            others = _column(copies, condition.field)
            texts = condition.matching({*own, *others})
            matching.append((condition, texts))
            passing_N &= condition.passing(own, texts)
            copies_M &= condition.passing(others, texts)

        # A copy that passes brings its document in.
        passing_N[np.array(owners, np.intp)[copies_M]] = True
        return Bindings(mask=passing_N, payload=_as_payload(matching))


def field_value(document: IndexedDocument | Place, name: str) -> str | None:
    """Return a document's value in a field; a column of the source that is called like one of
    farspan's own gives way."""
    if name == "title":
        return document.title
    if name == "origin":
        return document.origin
    return document.metadata.get(name)


def _column(places: Sequence[IndexedDocument | Place], name: str) -> list[str | None]:
    return [field_value(place, name) for place in places]


def _as_payload(matching: list[tuple[Condition, frozenset[str]]]) -> dict[str, str] | None:
    """Return the equalities that these conditions come to, as a store compares them; None where
    they are no such."""
    payload: dict[str, str] = {}
    for condition, texts in matching:
        name = condition.field
        # Stores have other text under "text".
        is_stored = FIELD.fullmatch(name) and name != "text"
        if condition.negated or len(texts) != 1 or not is_stored or name in payload:
            return None
        payload[name] = next(iter(texts))
    return payload


def parse_text(text: str) -> Condition:
    """Read a condition such as `year>=2020`, `lang=de,en`, `lang!=de` or `date=2021-01..2021-06`.

    Raises Refusal (usage, out-of-range).
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise _refuse(
            "usage",
            f"{text[:60]!r} is no condition",
            "it has no field, or no sign that compares",
            "write FIELD=VALUE, such as title=Introduction, year>=2020 or lang=de,en",
        )
    name, sign, value = match.groups()
    if sign in BOUNDS:
        limit = _read_limit(name, value)
        return Condition(field=name, tests=(Test(bounds=((BOUNDS[sign], limit),)),))
    parts = [value]
    if "," in value:
        parts = [part.strip() for part in value.split(",")]
    _refuse_many(name, len(parts))
    tests = tuple(_read_part(part) for part in parts)
    return Condition(field=name, tests=tests, negated=sign == "!=", literal=value)


def _read_part(part: str) -> Test:
    """Read one of the values of a text: `2020..2024`, `2020..`, or a value to equal."""
    low, dots, high = part.partition("..")
    bounds: list[tuple[Bound, Value]] = []
    if low.strip():
        bounds.append(("gte", read_value(low)))
    if high.strip():
        bounds.append(("lte", read_value(high)))
    if dots and bounds and all(_has_order(value) for _, value in bounds):
        return Test(bounds=tuple(bounds))
    return Test(equal=read_value(part))


def _read_json(name: str, value: Any) -> list[Condition]:
    """Read what a field must hold, as JSON: a value, several, or bounds."""
    if not isinstance(value, Mapping):
        return [Condition(field=name, tests=_read_values(name, value))]
    conditions = []
    bounds: list[tuple[Bound, Value]] = []
    keys = ("gt", "gte", "lt", "lte", "not")
    for key, operand in value.items():
        if key == "not":
            tests = _read_values(name, operand)
            conditions.append(Condition(field=name, tests=tests, negated=True))
        elif key in keys:
            limit = operand if isinstance(operand, str) else _scalar_text(name, operand)
            bounds.append((key, _read_limit(name, limit)))
        else:
            raise _refuse(
                "unknown-key",
                f"the field {name[:60]!r} cannot be compared by {str(key)[:60]!r}",
                f"keys: {', '.join(keys)}",
                advise(str(key), keys, verb="use", synonyms=()),
            )
    if bounds:
        conditions.append(Condition(field=name, tests=(Test(bounds=tuple(bounds)),)))
    if not conditions:
        raise _refuse(
            "usage",
            f"the condition on {name[:60]!r} is empty",
            f"keys: {', '.join(keys)}",
            'compare it, such as {"gte": 2020}',
        )
    return conditions


def _read_values(name: str, value: Any) -> tuple[Test, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    _refuse_many(name, len(values))
    tests = []
    for each in values:
        typed = not isinstance(each, str)
        text = _scalar_text(name, each) if typed else each
        tests.append(Test(equal=read_value(text), typed=typed))
    return tuple(tests)


def _scalar_text(name: str, value: Any) -> str:
    """Return a JSON scalar as the text that documents have. Raises Refusal (out-of-range)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and np.isfinite(float(value)):
        text = repr(value)
        if _NUMBER.fullmatch(text) and len(text) <= MAX_READ_CHARS:
            return text
    raise _refuse(
        "out-of-range",
        f"the field {name[:60]!r} cannot be compared to this",
        f"{msgspec.json.encode(value).decode()[:60]} is no text, number, true or false",
        "give a value, or a list of values",
    )


def _read_limit(name: str, text: str) -> Value:
    """Return a value that others are above or below. Raises Refusal (out-of-range) for a text."""
    value = read_value(text)
    if not _has_order(value):
        raise _refuse(
            "out-of-range",
            f"the field {name[:60]!r} cannot be compared to {text[:60]!r}",
            "only numbers and dates have an order here",
            f"give a number or a date: {shell_word(f'{name[:60]}>=2021-06')}",
        )
    return value


def _has_order(value: Value) -> bool:
    return value.number is not None or value.date is not None


def _refuse_many(name: str, count: int) -> None:
    if count == 0 or count > MAX_CONDITION_VALUES:
        raise _refuse(
            "out-of-range",
            f"the condition on {name[:60]!r} has {count:,} values",
            f"1 to {MAX_CONDITION_VALUES:,} can be given",
            "give those that matter",
        )


def _refuse_twice(conditions: list[Condition]) -> None:
    """Refuse two values to equal for one field: no document could have both."""
    equalities = set[str]()
    for condition in conditions:
        if condition.negated or condition.tests[0].equal is None:
            continue
        if condition.field in equalities:
            raise _refuse(
                "usage",
                f"the field {condition.field[:60]!r} is given twice",
                "a document has one value in each field",
                f"give the values in one: {shell_word(f'{condition.field[:60]}=A,B')}",
            )
        equalities.add(condition.field)


def _refuse_kind(name: str, test: Test, values: list[Value]) -> Refusal:
    example = values[0].text[:60]
    kinds = {"numbers": 0, "dates": 0, "true or false": 0}
    for value in values:
        kinds["numbers"] += value.number is not None
        kinds["dates"] += value.date is not None
        kinds["true or false"] += value.flag is not None
    most = max(kinds, key=lambda kind: kinds[kind])
    holds = most if kinds[most] else "text"
    return _refuse(
        "out-of-range",
        f"the field {name[:60]!r} cannot be compared to {test.operand.text[:60]!r}",
        f"it holds {holds}, such as {example!r}",
        f"compare it to what it holds: {shell_word(f'{name[:60]}={example}')}",
    )


def _refuse(code: str, what: str, fact: str, remedy: str) -> Refusal:
    return Refusal(code, what=what, where=_WHERE, fact=fact, remedy=remedy)


def unknown_field(name: str, fields: tuple[str, ...]) -> Refusal:
    return Refusal(
        "usage",
        what=f"there is no field {name!r} to filter by",
        where=_WHERE,
        fact=f"fields: {', '.join(fields)}",
        remedy=advise(name, fields, verb="filter by", synonyms=()),
    )
