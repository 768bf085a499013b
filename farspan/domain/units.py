"""Text to SI numbers and back. The only place that converts units: everything inside farspan is SI.

Seconds, bytes, counts, fractions. Decimal prefixes (k = 1000).
"""

from __future__ import annotations

import math
import re

_DIGITS = r"[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_NUMBER = re.compile(rf"\s*({_DIGITS})\s*(.*?)\s*", re.IGNORECASE)
#: A number and its unit, of several one after the other.
_PARTS = re.compile(rf"{_DIGITS}\s*[a-z]+\s*", re.IGNORECASE)

_SECONDS = {
    "": 1.0,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "secs": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "m": 60.0,
    "min": 60.0,
    "mins": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hr": 3600.0,
    "hrs": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "d": 86_400.0,
    "day": 86_400.0,
    "days": 86_400.0,
    "w": 604_800.0,
    "week": 604_800.0,
    "weeks": 604_800.0,
    "y": 31_536_000.0,
    "year": 31_536_000.0,
    "years": 31_536_000.0,
}
_BYTES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
}
#: In bytes a second, as a bare number is.
_BITS_PER_S = {
    "": 1.0,
    "bit/s": 1 / 8,
    "kbit/s": 1e3 / 8,
    "mbit/s": 1e6 / 8,
    "gbit/s": 1e9 / 8,
    "tbit/s": 1e12 / 8,
}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "B": 1e9, "M": 1e6, "k": 1e3}

#: From this share of the next prefix on three digits are rounded up to it.
ROUNDS_UP = 0.9995
#: Times a second, at most, that a machine is taken away.
MOST_FREQUENT = 1 / 60


def _split_unit(text: str | int | float) -> tuple[float, str]:
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        negative = _NUMBER.fullmatch(str(text).strip().removeprefix("-"))
        fault = "is negative" if negative else "does not start with a number"
        raise ValueError(f"{text!r} {fault}")
    number = float(match[1].replace("_", ""))
    if math.isinf(number):
        raise ValueError(f"{text!r} is too large a number")
    return number, match[2]


def _parse_scaled(
    text: str | int | float, table: dict[str, float] | dict[str, int], example: str
) -> float:
    number, unit = _split_unit(text)
    scale = table.get(unit.lower())
    if scale is None:
        raise ValueError(f"{text!r} has no known unit; write it like {example}")
    return number * scale


def parse_seconds(text: str | int | float) -> float:
    """`"57ms"`, `"90 min"`, `"1 hour 30m"` or a bare number of seconds, as seconds."""
    if isinstance(text, int | float):
        return float(text)
    parts = _PARTS.findall(text)
    if not parts or "".join(parts).strip() != text.strip():
        parts = [text]
    units = [_split_unit(part)[1].lower() for part in parts]
    scales = [_SECONDS.get(unit, 0.0) for unit in units]
    if scales != sorted(set(scales), reverse=True):
        raise ValueError(f"{text!r} does not go from a larger unit to a smaller one")
    return sum(_parse_scaled(part, _SECONDS, "5m or 1.5h") for part in parts)


def parse_duration(text: str | int | float, unit: str = "m") -> float:
    """`parse_seconds` for what people write: of bare numbers only 0 is taken.

    Raises ValueError for others: their writers may mean seconds, or another unit, such as `unit`.
    """
    seconds = parse_seconds(text)
    if seconds and is_bare(text):
        raise ValueError(f"{text!r} has no unit; write it like {text}{unit} or {text}s")
    return seconds


def parse_program_seconds(text: str | int | float, unit: str = "m") -> float:
    """`parse_duration` for files that programs write too: their bare numbers, with a decimal point,
    are seconds."""
    return parse_seconds(text) if isinstance(text, float) else parse_duration(text, unit)


def parse_round_trip(text: str | int | float) -> float:
    """`parse_program_seconds` for times that networks take.

    Raises ValueError for a bare number of 1 or more: its writer means milliseconds.
    """
    seconds = parse_program_seconds(text, "ms")
    if seconds >= 1 and is_bare(text):
        raise ValueError(f"{text!r} has no unit; write it like {text}ms or {text}s")
    return seconds


def is_bare(text: str | int | float) -> bool:
    """Return whether a quantity is a number without a unit."""
    match = _NUMBER.fullmatch(str(text))
    return match is not None and not match[2]


def parse_bytes(text: str | int | float) -> int:
    """`"24GB"`, `"512 MiB"` or a bare number of bytes, as bytes."""
    return round(_parse_scaled(text, {**_BYTES, "": 1.0}, "24GB or 512MiB"))


def parse_rate(text: str | int | float) -> float:
    """`"1Gbit/s"`, `"300GB/s"` or a bare number of bytes a second, as bytes a second. `Gb/s` is
    refused: its writer means bits, its reader may not."""
    if str(text).rstrip().endswith("b/s"):
        raise ValueError(f"{text!r} is not clear; write bits as 1Gbit/s, bytes as 1GB/s")
    bytes_per_s = {f"{unit}/s": scale for unit, scale in _BYTES.items()}
    return _parse_scaled(text, _BITS_PER_S | bytes_per_s, "1Gbit/s or 300GB/s")


def parse_count(text: str | int | float) -> int:
    """`"124M"`, `"256k"`, `"1.5B"` or a bare number, as a whole number. A trailing noun ("tokens")
    is allowed."""
    number, unit = _split_unit(text)
    unit = re.sub(r"\s*(tokens|params|parameters|steps|sequences)$", "", unit.lower())
    if unit not in _COUNT:
        raise ValueError(f"{text!r} has no known unit; write it like 256k or 1.5M")
    return round(number * _COUNT[unit])


def parse_fraction(text: str | int | float) -> float:
    """`"5%"` or `0.05` as a fraction; between 0 and 1."""
    number, unit = _split_unit(text)
    if unit not in ("", "%"):
        raise ValueError(f"{text!r} is not a fraction; write it like 5% or 0.05")
    value = number / 100 if unit == "%" else number
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not between 0 and 1")
    return value


def parse_frequency(text: str | int | float) -> float:
    """`"0.1/h"` or `"2/day"`, or 0, as times a second. Raises ValueError for more than one a
    minute: no run gets on between them."""
    number, unit = _split_unit(text)
    if not unit and number == 0:
        return 0.0
    seconds = _SECONDS.get(unit.removeprefix("/").strip().lower(), 0.0)
    if not unit.startswith("/") or not seconds or unit.strip() == "/":
        raise ValueError(f"{text!r} is no number of times in a time; write it like 0.1/h or 2/day")
    if number / seconds > MOST_FREQUENT:
        raise ValueError(f"{text!r} is more often than once a minute")
    return number / seconds


def counted(number: int, noun: str) -> str:
    """`1 step`, `1,400 steps`, `2 passes`, `2 queries`."""
    if number != 1:
        if re.search(r"[^aeiou]y$", noun):
            noun = f"{noun[:-1]}ies"
        elif noun.endswith(("s", "x", "ch")):
            noun = f"{noun}es"
        else:
            noun = f"{noun}s"
    return f"{number:,} {noun}"


def format_seconds(seconds: float) -> str:
    """Seconds as a person writes them: `0.8 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole / 86400:.1f} days"


def _format_prefixed(value: float, unit: str, prefixes: str = "TGMk") -> str:
    """Format three digits with the largest prefix that they reach, rounded: 999.6 k is 1 M."""
    for prefix in prefixes:
        scale = _PREFIXES[prefix]
        if abs(value) >= ROUNDS_UP * scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def format_count(number: float) -> str:
    """Format a count in three significant digits: `850`, `2.21 M`, `13.9 M`, `124 M`."""
    return _format_prefixed(number, "", "TBMk").rstrip()


def format_bytes(size: float) -> str:
    """Bytes in three significant digits, decimal prefixes: `7.6 MB`, `1.2 GB`."""
    return _format_prefixed(size, "B")


def format_rate(bytes_per_s: float) -> str:
    """Format a network's rate in bits, as is usual: `996 Mbit/s`, `10 Gbit/s`."""
    return _format_prefixed(bytes_per_s * 8, "bit/s")


def format_flops(flops_per_s: float) -> str:
    """Format a rate of arithmetic: `128 GFLOP/s`, `2.25 PFLOP/s`."""
    if abs(flops_per_s) >= ROUNDS_UP * 1e9:
        return _format_prefixed(flops_per_s, "FLOP/s", "PTG")
    return f"{flops_per_s / 1e6:.3g} MFLOP/s"


def short_time(seconds: float) -> str:
    """Three digits for what is compared closely: `88.1 ms`, `117 ms`, `1.36 s`."""
    if seconds >= 100:
        return format_seconds(seconds)
    if seconds < ROUNDS_UP:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def format_usd(usd: float) -> str:
    """Dollars: `$2.64`, `$1,200`, and four digits after the point below one: `$0.0031`."""
    if usd >= 1000:
        return f"${usd:,.0f}"
    if usd >= 1 or usd == 0:
        return f"${usd:,.2f}"
    return f"${usd:.4f}"
