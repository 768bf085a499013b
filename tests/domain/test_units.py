"""Numbers as people read them: three digits, and the prefix that they reach once rounded."""

from __future__ import annotations

import pytest

from farspan.domain.units import (
    counted,
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    is_bare,
    parse_duration,
    parse_program_seconds,
    parse_round_trip,
    parse_seconds,
    short_time,
)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (format_count(999_808), "1 M"),
        (format_count(999_400), "999 k"),
        (format_count(13_874_000), "13.9 M"),
        (format_count(850), "850"),
        (format_bytes(999.6e6), "1 GB"),
        (format_bytes(7.63e6), "7.63 MB"),
        (format_rate(999.7e6 / 8), "1 Gbit/s"),
        (format_rate(996e6 / 8), "996 Mbit/s"),
        (format_rate(12), "96 bit/s"),
        (format_flops(999.6e9), "1 TFLOP/s"),
        (format_flops(2.25e15), "2.25 PFLOP/s"),
        (short_time(0.9996), "1 s"),
        (short_time(0.0881), "88.1 ms"),
    ],
)
def test_formatted_number_takes_the_prefix_that_it_rounds_to(said, text):
    assert said == text


@pytest.mark.parametrize("form", [format_count, format_bytes, format_rate, format_flops])
def test_formatted_numbers_within_the_prefixes_use_no_exponent(form):
    for power in range(6, 14):
        for share in (0.999, 0.9994, 0.99949, 0.9995, 0.99951, 0.9999, 1.0, 1.001):
            assert "e" not in form(share * 10**power).replace("bit", "").replace("FLOP", "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5minutes", 300),
        ("5 min", 300),
        ("1hour30m", 5400),
        ("1h 30m", 5400),
        ("1 h 05 min", 3900),
        ("2 Hours", 7200),
        ("1e3s", 1000),
        ("90", 90),
        (90, 90),
        ("1.5h", 5400),
        ("57ms", 0.057),
        ("1 day", 86400),
        ("2w", 1_209_600),
    ],
)
def test_times_are_read_as_people_write_them(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", 5, "0.5", 0.5, " 90 ", "1e3", "1_000"])
def test_time_of_a_person_without_a_unit_is_refused(text):
    assert is_bare(text)
    with pytest.raises(ValueError, match=r"has no unit; write it like .*m or .*s"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300), ("0", 0), (0, 0), ("1h30m", 5400)])
def test_time_of_a_person_has_a_unit_or_is_zero(text, seconds):
    assert parse_duration(text) == seconds


def test_round_trip_without_a_unit_is_seconds_only_where_a_program_wrote_it():
    assert parse_round_trip(0.057) == 0.057 and parse_round_trip("57ms") == 0.057
    for text in (57, "57", 57.4, 1, "0.057"):
        with pytest.raises(ValueError, match=rf"has no unit; write it like {text}ms or {text}s$"):
            parse_round_trip(text)
    assert parse_program_seconds(3600.0) == 3600
    with pytest.raises(ValueError, match="has no unit"):
        parse_program_seconds(24)


@pytest.mark.parametrize("seconds", [30, 200, 7500])
def test_formatted_times_are_parsed_back(seconds):
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("-5m", "is negative"),
        ("- 5 min", "is negative"),
        ("soon", "does not start with a number"),
        ("5 parsecs", "no known unit"),
        ("1h30", "no known unit"),
        ("30m1h", "larger unit"),
        ("5m5m", "larger unit"),
        ("1h 2 parsecs", "no known unit"),
        ("1e999s", "too large"),
        ("", "does not start"),
    ],
)
def test_malformed_time_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        parse_seconds(text)


def test_counted_nouns_are_singular_only_for_one():
    assert [counted(1, "step"), counted(1400, "step"), counted(0, "host")] == [
        "1 step",
        "1,400 steps",
        "0 hosts",
    ]
    assert [counted(1, "pass"), counted(2, "pass"), counted(2, "batch")] == [
        "1 pass",
        "2 passes",
        "2 batches",
    ]
