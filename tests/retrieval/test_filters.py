"""Filters against a plain evaluation of every condition at every place of every document."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.domain.corpus import Place
from farspan.domain.problems import Refusal
from farspan.retrieval.filtered_vectors import FilteredVectors
from farspan.retrieval.filters import Filters, parse_text, read_value
from farspan.retrieval.passages import IndexedDocument


def document(*places: Mapping[str, str], title: str = "t") -> IndexedDocument:
    """A document with these values in its fields, and with those of its copies."""
    first, *others = places or ({},)
    copies = tuple(Place(title=title, origin="o", metadata=dict(each)) for each in others)
    return IndexedDocument(key="k", title=title, origin="o", metadata=dict(first), places=copies)


def passing(where: object, documents: list[IndexedDocument]) -> list[int]:
    return np.flatnonzero(Filters.parse(where).mask(documents)).tolist()


VALUES = [
    "1999",
    "2020",
    "2020.0",
    "2021",
    "-3.5",
    "1e3",
    "007",
    "true",
    "False",
    "de",
    "en",
    "",
    "de,en",
    "2021-05",
    "2021-05-03",
    "2021-05-03T10:00Z",
    "2020-02-30",
]
BOUNDS = {
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
}


def number_of(text: str) -> float | None:
    """A number as JSON has it."""
    try:
        value = float(text)
    except ValueError:
        return None
    has_zeros = len(text) > 1 and text[0] == "0" and text[1].isdigit()
    return None if has_zeros else value


@st.composite
def corpora(draw: st.DrawFn) -> list[IndexedDocument]:
    fields = st.dictionaries(st.sampled_from(["a", "b c", "é.x"]), st.sampled_from(VALUES))
    places = st.lists(fields, min_size=1, max_size=3)
    return [document(*each) for each in draw(st.lists(places, max_size=8))]


@pytest.mark.property
@given(
    corpora(),
    st.dictionaries(
        st.sampled_from(["a", "b c", "é.x"]),
        st.lists(st.sampled_from(["de", "en", "", "x", "007"]), min_size=1, max_size=3),
    ),
)
def test_lists_of_texts_pass_where_one_place_has_one_of_each(documents, where):
    expected = []
    for row, each in enumerate(documents):
        places = [place.metadata for place in each.everywhere]
        if any(all(p.get(name) in texts for name, texts in where.items()) for p in places):
            expected.append(row)
    assert passing(where, documents) == expected
    one = {name: texts[0] for name, texts in where.items()}
    expected = []
    for row, each in enumerate(documents):
        places = [place.metadata for place in each.everywhere]
        if any(all(p.get(name) == text for name, text in one.items()) for p in places):
            expected.append(row)
    assert passing(one, documents) == expected


@pytest.mark.property
@given(corpora(), st.sampled_from([*BOUNDS]), st.sampled_from([-4, 0, 1000.0, 1999, 2020, 2021]))
def test_bounds_of_numbers_pass_as_python_compares_them(documents, bound, limit):
    documents = [*documents, document({"a": "5"})]
    expected = []
    for row, each in enumerate(documents):
        texts = [place.metadata.get("a", "") for place in each.everywhere]
        numbers = [n for n in map(number_of, texts) if n is not None]
        if any(BOUNDS[bound](number, limit) for number in numbers):
            expected.append(row)
    # A year is also a date, and is compared to dates such as 2021-05.
    if 1000 <= limit:
        dated = [
            row
            for row, each in enumerate(documents)
            if any("-" in p.metadata.get("a", "")[1:] for p in each.everywhere)
        ]
        got = passing({"a": {bound: limit}}, documents)
        assert [r for r in got if r not in dated] == [r for r in expected if r not in dated]
    else:
        assert passing({"a": {bound: limit}}, documents) == expected


DAYS = st.dates(date(1990, 1, 1), date(2030, 12, 31))


@pytest.mark.property
@given(st.lists(DAYS, min_size=1, max_size=10), DAYS, DAYS)
def test_ranges_of_days_and_months_pass_as_dates_compare(days, first, last):
    documents = [document({"day": day.isoformat()}) for day in days]
    wanted = [row for row, day in enumerate(days) if first <= day <= last]
    assert passing([f"day={first}..{last}"], documents) == wanted
    assert passing({"day": {"gte": str(first), "lte": str(last)}}, documents) == wanted
    assert passing([f"day>={first}", f"day<={last}"], documents) == wanted
    month = f"{first:%Y-%m}"
    assert passing([f"day={month}"], documents) == [
        row for row, day in enumerate(days) if f"{day:%Y-%m}" == month
    ]
    assert passing([f"day>{month}"], documents) == [
        row for row, day in enumerate(days) if f"{day:%Y-%m}" > month
    ]
    assert passing([f"day<={month}"], documents) == [
        row for row, day in enumerate(days) if f"{day:%Y-%m}" <= month
    ]
    assert passing([f"day<{first.year}"], documents) == [
        row for row, day in enumerate(days) if day.year < first.year
    ]


@pytest.mark.property
@given(corpora(), st.sampled_from(["a", "b c", "é.x"]), st.sampled_from(VALUES))
def test_excluded_documents_are_those_that_do_not_equal_at_some_place(documents, name, text):
    tests = Filters.parse({name: text})
    without = passing({name: {"not": text}}, documents)
    for row, each in enumerate(documents):
        singles = [document(place.metadata) for place in each.everywhere]
        assert (row in without) == (not all(tests.mask(singles)))


@pytest.mark.property
@given(corpora(), st.sampled_from(["a", "b c", "é.x"]), st.sampled_from(VALUES))
def test_text_of_a_value_always_finds_what_has_exactly_that_value(documents, name, text):
    has = [
        row
        for row, each in enumerate(documents)
        if any(p.metadata.get(name) == text for p in each.everywhere)
    ]
    assert set(has) <= set(passing([f"{name}={text}"], documents))
    assert set(has) <= set(passing({name: text}, documents))


def test_values_are_read_as_what_they_are():
    assert read_value("2020").number == 2020 and read_value("007").number is None
    assert read_value("TRUE").flag is True and read_value("yes").flag is None
    assert read_value("2020-02-30").date is None and read_value("0000").date is None
    assert read_value("2021-05-03T10:00+02:00").date[0] == datetime(2021, 5, 3, 8)
    assert read_value("9999-12-31").date[1] == datetime.max
    assert read_value("nan").number is None and read_value("1e99999").number is None
    assert read_value("9" * 60).number == int("9" * 60)
    for odd in ("٢٠٢٠", "1_000", " ", "0x10", "2021-05-03T10:00+99:99", "9" * 1000):
        value = read_value(odd)
        assert value.number is None and value.date is None, odd


def test_whole_numbers_are_compared_exactly():
    documents = [document({"n": "9007199254740993"}), document({"n": "9007199254740992.0"})]
    assert passing({"n": 9007199254740993}, documents) == [0]
    assert passing(["n=9007199254740992"], documents) == [1]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["lang=de,en"], [0, 1]),
        (["lang!=de"], [1, 2, 3]),
        (["draft=true"], [0]),
        ({"draft": False}, [1]),
        ({"year": 2020}, [0]),
        ({"year": [2020, "2021"], "lang": "en"}, [1]),
        ({"year": {"gte": 2020, "lt": 2022, "not": 2021}}, [0]),
        (["year=2020..", "year<2022"], [0, 1]),
        (["year=..2020"], [0]),
        (["full name=Zoë"], [1]),
        (["a.b=1"], [2]),
        (["title=One, two"], [3]),
        ({"title": ["One, two", "no"]}, [3]),
        ([], [0, 1, 2, 3]),
        (None, [0, 1, 2, 3]),
        ({"year": "2020"}, [0]),
    ],
)
def test_conditions_in_both_ways_of_writing(where, expected):
    documents = [
        document({"lang": "de", "year": "2020", "draft": "True"}),
        document({"lang": "en", "year": "2021", "draft": "false", "full name": "Zoë"}),
        document({"a.b": "1", "year": "n/a"}),
        document(title="One, two"),
    ]
    assert passing(where, documents) == expected


def test_commas_and_dots_of_a_value_that_there_is_are_its_own():
    documents = [document(title=title) for title in ("a", "b", "a, b", "1..2", "1")]
    assert passing(["title=a, b"], documents) == [2]
    assert passing(["title=a,b"], documents) == [0, 1]
    assert passing(["title=1..2"], documents) == [3]


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        (["year"], "usage", "no condition"),
        (["=x"], "usage", "no condition"),
        (["year>=abc"], "out-of-range", "numbers and dates"),
        ({"year": {"gte": True}}, "out-of-range", "numbers and dates"),
        ({"year": {"from": 1}}, "unknown-key", "gte"),
        ({"year": {}}, "usage", "empty"),
        ({"year": None}, "out-of-range", "null"),
        ({"year": [[1]]}, "out-of-range", "no text"),
        ({"year": []}, "out-of-range", "0 values"),
        ({"year": float("nan")}, "out-of-range", "no text"),
        ({"lang": ["x"] * 2000}, "out-of-range", "2,000"),
        ([f"f{n}=1" for n in range(99)], "out-of-range", "99"),
        (["lang=de", "lang=en"], "usage", "twice"),
        (["lang>=3"], "out-of-range", "it holds text, such as 'de'"),
        ({"lang": 3}, "out-of-range", "it holds text"),
        ({"lang": False}, "out-of-range", "it holds text"),
        ({"draft": 3}, "out-of-range", "it holds true or false"),
        (["year>=2020-01"], None, ""),
    ],
)
def test_condition_that_cannot_be_compared_is_refused_with_the_fact(where, code, words):
    documents = [document({"year": "2020", "lang": "de", "draft": "true"}), document()]
    if code is None:
        assert passing(where, documents) == [0]
        return
    with pytest.raises(Refusal) as refused:
        Filters.parse(where).mask(documents)
    problem = refused.value.problem
    assert problem.code == code and words in f"{problem.what}; {problem.fact}; {problem.remedy}"


def test_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(Refusal) as refused:
        Filters.parse({"lnag": "de"}).check_fields(("title", "lang"))
    assert refused.value.problem.code == "usage" and "lang" in refused.value.problem.remedy


@pytest.mark.parametrize(
    ("where", "payload"),
    [
        ({"lang": "de"}, {"lang": "de"}),
        (["year=2020", "lang=de"], {"year": "2020", "lang": "de"}),
        ({"year": {"gt": 2020}}, {"year": "2021"}),
        ({"year": {"gte": 2020}}, None),
        ({"lang": {"not": "de"}}, None),
        ({"full name": "Z"}, None),
        ({"text": "x"}, None),
        ({"lang": "none"}, None),
    ],
)
def test_store_is_asked_only_for_what_it_compares_alike(where, payload):
    documents = [
        document({"lang": "de", "year": "2020", "full name": "Z", "text": "x"}),
        document({"lang": "en", "year": "2021", "full name": "Y"}),
    ]
    assert Filters.parse(where).bind(documents).payload == payload


def test_parse_is_the_same_for_what_is_parsed():
    filters = Filters.parse(["year>=2020"])
    assert Filters.parse(filters) is filters and filters and not Filters.parse({})
    assert filters.conditions == (parse_text("year>=2020"),)


class ListStore:
    """Vectors in memory, exact, with the payloads of their documents."""

    def __init__(self, vectors: np.ndarray, payloads: list[dict[str, str]]) -> None:
        self.all = vectors
        self.payloads = payloads

    def search(self, vector, k, where=None):
        from farspan.retrieval.stores import Hits

        rows = [
            row
            for row, payload in enumerate(self.payloads)
            if (where or {}).items() <= payload.items()
        ]
        scores = self.all[rows] @ vector
        order = np.argsort(-scores, kind="stable")[:k]
        return Hits(np.array(rows, np.int64)[order], scores[order].astype(np.float32))

    def vectors(self, ids):
        return self.all[np.array(ids, int)]


class ListPassages:
    def __init__(self, owners: np.ndarray) -> None:
        self.rows_N = np.zeros(len(owners), [("id", "<i8"), ("document", "<i4")])
        self.rows_N["id"] = np.arange(len(owners))
        self.rows_N["document"] = owners

    def rows_of(self, ids):
        return np.asarray(ids, np.intp)


@pytest.mark.property
@given(
    corpora().filter(len),
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.sampled_from([0, 3, 100]),
    st.sampled_from([{"a": ["de", "en", ""]}, {"a": "de"}, {"a": {"not": "de"}}, {"b c": "en"}]),
)
def test_nearest_passages_are_those_of_an_exhaustive_search(documents, seed, k, most, where):
    from farspan.retrieval import filtered_vectors

    rng = np.random.default_rng(seed)
    owners = np.sort(rng.integers(0, len(documents), 30))
    vectors = rng.standard_normal((30, 4)).astype(np.float32)
    payloads = [{k: v for k, v in documents[n].metadata.items() if k == "a"} for n in owners]
    bindings = Filters.parse(where).bind(documents)
    query = rng.standard_normal(4).astype(np.float32)
    before = filtered_vectors.MAX_READ_PASSAGES
    filtered_vectors.MAX_READ_PASSAGES = most
    try:
        near = FilteredVectors(
            ListStore(vectors, payloads), ListPassages(owners), documents, bindings
        )
        rows, scores = near.nearest(query, k)
    finally:
        filtered_vectors.MAX_READ_PASSAGES = before
    allowed = np.flatnonzero(bindings.mask[owners])
    cosines = vectors[allowed] @ query
    expected = allowed[np.argsort(-cosines, kind="stable")][:k]
    np.testing.assert_allclose(np.sort(scores), np.sort(vectors[expected] @ query), rtol=1e-5)
    assert set(rows.tolist()) == set(expected.tolist())
