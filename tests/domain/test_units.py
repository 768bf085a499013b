"""Numbers as people read them: three digits, and the prefix that they reach once rounded."""

from __future__ import annotations

import pytest

from farspan.domain.units import format_bytes, format_count, format_flops, format_rate, short_time


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (format_count(999_808), "1 M"), (format_count(999_400), "999 k"), (format_count(13_874_000), "13.9 M"),
        (format_count(850), "850"), (format_bytes(999.6e6), "1 GB"), (format_bytes(7.63e6), "7.63 MB"),
        (format_rate(999.7e6 / 8), "1 Gbit/s"), (format_rate(996e6 / 8), "996 Mbit/s"), (format_rate(12), "96 bit/s"),
        (format_flops(999.6e9), "1 TFLOP/s"), (format_flops(2.25e15), "2.25 PFLOP/s"), (short_time(0.9996), "1 s"),
        (short_time(0.0881), "88.1 ms"),
    ],
)  # fmt: skip
def test_what_rounds_up_to_the_next_prefix_has_it(said, text):
    assert said == text


@pytest.mark.parametrize("form", [format_count, format_bytes, format_rate, format_flops])
def test_nothing_within_its_prefixes_is_told_in_powers_of_ten(form):
    for power in range(6, 14):
        for share in (0.999, 0.9994, 0.99949, 0.9995, 0.99951, 0.9999, 1.0, 1.001):
            assert "e" not in form(share * 10**power).replace("bit", "").replace("FLOP", "")
