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
    word: seconds
    for words, seconds in (
        ("us", 1e-6),
        ("ms", 1e-3),
        ("s sec secs second seconds", 1.0),
        ("m min mins minute minutes", 60.0),
        ("h hr hrs hour hours", 3600.0),
        ("d day days", 86400.0),
        ("w week weeks", 7 * 86400.0),
        ("y year years", 365 * 86400.0),
    )
    for word in words.split()
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
_BITS_PER_S = {
    "bit/s": 1 / 8,
    "kbit/s": 1e3 / 8,
    "mbit/s": 1e6 / 8,
    "gbit/s": 1e9 / 8,
    "tbit/s": 1e12 / 8,
}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}

#: From this share of the next prefix on three digits are rounded up to it.
ROUNDS_UP = 0.9995


def _split(text: str | int | float) -> tuple[float, str]:
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        negative = _NUMBER.fullmatch(str(text).strip().removeprefix("-"))
        raise ValueError(
            f"{text!r} {'is negative' if negative else 'does not start with a number'}"
        )
    number = float(match[1].replace("_", ""))
    if math.isinf(number):
        raise ValueError(f"{text!r} is too large a number")
    return number, match[2]


def _scaled(
    text: str | int | float, table: dict[str, float] | dict[str, int], example: str
) -> float:
    number, unit = _split(text)
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
    units = [_SECONDS.get(_split(part)[1].lower(), 0.0) for part in parts]
    if units != sorted(set(units), reverse=True):
        raise ValueError(f"{text!r} does not go from a larger unit to a smaller one")
    return sum(_scaled(part, {**_SECONDS, "": 1.0}, "5m or 1.5h") for part in parts)


def parse_duration(text: str | int | float) -> float:
    """`parse_seconds` for what people write: of bare numbers only 0 is taken.

    Raises ValueError for others: their writers may mean minutes, or milliseconds.
    """
    seconds = parse_seconds(text)
    if seconds and is_bare(text):
        raise ValueError(f"{text!r} has no unit; write it like {text}m or {text}s")
    return seconds


def parse_program_seconds(text: str | int | float) -> float:
    """`parse_duration` for files that programs write too: their bare numbers, with a decimal point,
    are seconds."""
    return parse_seconds(text) if isinstance(text, float) else parse_duration(text)


def parse_round_trip(text: str | int | float) -> float:
    """`parse_program_seconds` for times that networks take.

    Raises ValueError for a bare number of 1 or more: its writer means milliseconds.
    """
    seconds = parse_program_seconds(text)
    if seconds >= 1 and is_bare(text):
        raise ValueError(f"{text!r} has no unit; write it like {text}ms or {text}s")
    return seconds


def is_bare(text: str | int | float) -> bool:
    """Whether a quantity is a number without a unit."""
    match = _NUMBER.fullmatch(str(text))
    return match is not None and not match[2]


def parse_bytes(text: str | int | float) -> int:
    """`"24GB"`, `"512 MiB"` or a bare number of bytes, as bytes."""
    return round(_scaled(text, {**_BYTES, "": 1.0}, "24GB or 512MiB"))


def parse_rate(text: str | int | float) -> float:
    """`"1Gbit/s"`, `"300GB/s"` or a bare number of bytes a second, as bytes a second. `Gb/s` is
    refused: its writer means bits, its reader may not."""
    if str(text).rstrip().endswith("b/s"):
        raise ValueError(f"{text!r} is not clear; write bits as 1Gbit/s, bytes as 1GB/s")
    bytes_per_s = {f"{unit}/s": scale for unit, scale in _BYTES.items()}
    return _scaled(text, {**_BITS_PER_S, **bytes_per_s, "": 1.0}, "1Gbit/s or 300GB/s")


def parse_count(text: str | int | float) -> int:
    """`"124M"`, `"256k"`, `"1.5B"` or a bare number, as a whole number. A trailing noun ("tokens")
    is allowed."""
    number, unit = _split(text)
    unit = re.sub(r"\s*(tokens|params|parameters|steps|sequences)$", "", unit.lower())
    if unit not in _COUNT:
        raise ValueError(f"{text!r} has no known unit; write it like 256k or 1.5M")
    return round(number * _COUNT[unit])


def parse_fraction(text: str | int | float) -> float:
    """`"5%"` or `0.05` as a fraction; between 0 and 1."""
    number, unit = _split(text)
    if unit not in ("", "%"):
        raise ValueError(f"{text!r} is not a fraction; write it like 5% or 0.05")
    value = number / 100 if unit == "%" else number
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not between 0 and 1")
    return value


def counted(number: int, noun: str) -> str:
    """`1 step`, `1,400 steps`, `2 passes`, `2 queries`."""
    if number != 1:
        ends_in_y = noun.endswith("y") and noun[-2:-1] not in "aeiou"
        noun = (
            f"{noun[:-1]}ies"
            if ends_in_y
            else f"{noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
        )
    return f"{number:,} {noun}"


def format_seconds(seconds: float) -> str:
    """Seconds as a person says them: `0.8 s`, `3 min 20 s`, `2 h 05 min`."""
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


def _prefixed(value: float, prefixes: tuple[tuple[float, str], ...]) -> str | None:
    """Three digits with the largest prefix that they reach, rounded: 999.6 k is 1 M. None below all
    prefixes."""
    for scale, suffix in prefixes:
        if abs(value) >= ROUNDS_UP * scale:
            return f"{value / scale:.3g}{suffix}"
    return None


def format_count(number: float) -> str:
    """A count in three significant digits: `850`, `2.21 M`, `13.9 M`, `124 M`."""
    return (
        _prefixed(number, ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))) or f"{number:.0f}"
    )


def format_bytes(size: float) -> str:
    """Bytes in three significant digits, decimal prefixes: `7.6 MB`, `1.2 GB`."""
    return (
        _prefixed(size, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB")))
        or f"{size:.0f} B"
    )


def format_rate(bytes_per_s: float) -> str:
    """A network's rate as its people say it, in bits: `996 Mbit/s`, `10 Gbit/s`."""
    bits = bytes_per_s * 8
    prefixed = _prefixed(
        bits, ((1e12, " Tbit/s"), (1e9, " Gbit/s"), (1e6, " Mbit/s"), (1e3, " kbit/s"))
    )
    return prefixed or f"{bits:.0f} bit/s"


def format_flops(flops_per_s: float) -> str:
    """A rate of arithmetic: `128 GFLOP/s`, `2.25 PFLOP/s`."""
    prefixed = _prefixed(flops_per_s, ((1e15, " PFLOP/s"), (1e12, " TFLOP/s"), (1e9, " GFLOP/s")))
    return prefixed or f"{flops_per_s / 1e6:.3g} MFLOP/s"


def short_time(seconds: float) -> str:
    """Three digits for what is compared closely: `88.1 ms`, `117 ms`, `1.36 s`."""
    if seconds >= 100:
        return format_seconds(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds < ROUNDS_UP else f"{seconds:.3g} s"


def format_usd(usd: float) -> str:
    """Dollars: `$2.64`, `$1,200`, and below one as many digits as say something: `$0.0031`."""
    if usd >= 1000:
        return f"${usd:,.0f}"
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.4f}"
