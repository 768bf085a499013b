"""The API: what it answers, what it refuses and how, and that its schema is true of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import quote

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.serve.conftest import Server
from tests.serve.library import NASTY, RIVERS, texts
from tests.waiting import LIMIT_S


def search(server: Server, q: str, **parameters) -> dict:
    answer = server.get("/api/search", params={"q": q, **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def problem(answer) -> dict:
    """The problem that an answer is, without a traceback in it."""
    assert answer.headers["content-type"] == "application/json"
    assert "Traceback" not in answer.text and "line " not in answer.json()["problem"]["fact"]
    told = answer.json()["problem"]
    assert all(told[key] for key in ("code", "what", "where", "fact", "remedy")), told
    return told


def test_an_answer_carries_what_one_cites(server):
    answer = search(server, "rhine barge")
    assert answer["total"] == 2 * len(RIVERS)
    assert {"query": "rhine barge", "system": "bm25", "why": "counted"}.items() <= answer.items()
    first = answer["results"][0]
    assert (first["title"], first["origin"]) == ("The Rhine mouth", "rivers/rhine.md")
    assert (first["line"], first["page"], first["headings"]) == (
        13,
        0,
        ["Rivers of Europe", "Rhine"],
    )
    assert first["metadata"] == {"lang": "en", "kind": "note"} and len(first["id"]) == 16
    assert {first["passage"][start:stop].lower() for start, stop in first["marks"]} == {
        "rhine",
        "barge",
    }
    whole = server.get(f"/api/passages/{first['id']}").json()
    assert whole["passage"] == first["passage"]
    similar = server.get(f"/api/passages/{first['id']}/similar", params={"k": 3}).json()
    assert similar["id"] == first["id"] and len(similar["results"]) == 3
    assert first["id"] not in [result["id"] for result in similar["results"]]


def test_a_result_names_each_place_of_its_copies(server):
    first, *others = search(server, "rhine barge")["results"]
    assert first["copies"] == len(first["also"]) == 5
    assert first["also"][1] == {"title": "Old", "origin": "old/2.md", "line": 2}
    whole = server.get(f"/api/passages/{first['id']}").json()
    assert whole["also"] == first["also"]
    assert not any(result["also"] or result["copies"] for result in others)


def test_pages_follow_one_another(server):
    ids = [
        r["id"]
        for offset in range(0, 30, 7)
        for r in search(server, "river", k=7, offset=offset)["results"]
    ]
    assert len(ids) == len({*ids}) == search(server, "river")["total"]
    assert search(server, "river", offset=500)["results"] == []


def test_a_search_is_narrowed_by_fields_and_by_a_system(server):
    essays = search(server, "river", kind="essay", lang="en", k=100)
    assert essays["total"] == len(RIVERS)
    assert {result["metadata"]["kind"] for result in essays["results"]} == {"essay"}
    assert (
        search(server, "river", **{"where.kind": "essay", "where.lang": "en", "k": 100}) == essays
    )
    assert search(server, "river", system="model")["system"] == "model"
    told = problem(server.get("/api/search", params={"q": "river", "langg": "en"}))
    assert told["code"] == "usage" and told["remedy"] == "filter by lang"
    assert "twice" in problem(server.get("/api/search?q=river&lang=en&lang=de"))["what"]


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("/api/search", "out-of-range", "parameter q"),
        ("/api/search?q=%20", "usage", "nothing to search for"),
        ("/api/search?q=a&k=0", "out-of-range", "set k=1"),
        ("/api/search?q=a&k=101", "out-of-range", "set k=100"),
        ("/api/search?q=a&k=many", "out-of-range", "'many' is given"),
        ("/api/search?q=a&offset=-1", "out-of-range", "set offset=0"),
        ("/api/search?q=a&system=google", "out-of-range", "parameter system"),
        ("/api/search?q=" + 2001 * "a", "out-of-range", "shorten q to 2,000 characters"),
        ("/api/passages/0000000000000000/similar?k=1000", "out-of-range", "set k=100"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_with_what_can(server, address, code, words):
    answer = server.get(address)
    assert answer.status_code == 422
    told = problem(answer)
    assert told["code"] == code and words in " ".join(told.values())


def test_a_query_may_be_2000_characters_of_any_script(server):
    assert search(server, "🚣" * 2000)["total"] == 0
    assert search(server, "נהר")["results"][0]["origin"] == "hebrew.txt"
    boats = search(server, "kayak 🚣")["results"]
    emoji = next(result for result in boats if result["origin"].startswith("emoji"))
    assert [emoji["passage"][start:stop] for start, stop in emoji["marks"]] == ["kayak"]


def test_a_search_by_post_answers_like_one_by_get(server):
    form = {"q": "river", "k": 3, "offset": 1, "system": "model", "where": {"kind": "essay"}}
    asked = {"where.kind": "essay", "k": 3, "offset": 1, "system": "model"}
    assert server.post("/api/search", form).json() == search(server, "river", **asked)
    assert server.post("/api/search", {"q": "river"}).json() == search(server, "river")


def test_a_long_text_goes_by_post(server):
    """It would be too long for an address."""
    boats = "🚣" * 2000
    titles = {"title": "é" * 8000}
    answer = server.post("/api/search", {"q": boats, "where": titles})
    assert answer.status_code == 200 and answer.json()["query"] == boats


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "q"),
        ({"q": " "}, "nothing to search for"),
        ({"q": "a" * 50_000}, "at most 2,000"),
        ({"q": "a", "k": 0}, "k"),
        ({"q": "a", "k": 101}, "at most 100"),
        ({"q": "a", "offset": 10_001}, "at most 10,000"),
        ({"q": "a", "offset": -1}, "offset"),
        ({"q": "a", "system": "google"}, "system"),
        ({"q": "a", "where": {"langg": "en"}}, "filter by lang"),
        ({"q": "a", "where": {"lang": 1}}, "it holds text"),
        ({"q": "a", "where": {"lang": {"from": 1}}}, "gte"),
        ({"q": "a", "where": ["lang"]}, "no condition"),
        ({"q": "a", "ofset": 1}, "use offset instead of ofset"),
    ],
)
def test_a_search_by_post_that_cannot_be_is_refused(server, form, words):
    answer = server.post("/api/search", form)
    assert answer.status_code == 422, answer.text
    assert words in " ".join(problem(answer).values())


@pytest.mark.parametrize(
    "q", [NASTY, "'; DROP TABLE x; --", "\x00\x1b[31m", "{{7*7}}", "%s%n", "../../etc", "\udcff"]
)
def test_a_hostile_query_is_a_query(server, q):
    answer = server.get(
        "/api/search?q=" + quote(q, errors="surrogatepass") + "&title=" + quote(NASTY)
    )
    assert answer.status_code == 200 and answer.json()["total"] == 0
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2f..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static/search.html",
        "/static/__init__.py",
        "/static//etc/passwd",
        "/api/passages/..%2f..%2fserve.json",
        "/serve.json",
        "/docs",
        "/redoc",
        "/report/../serve.json",
        "/api/passages/" + 100 * "a",
    ],
)
def test_no_address_leads_to_the_disk(server, path):
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status in (404, 422)
        assert json.loads(answer.read())["problem"]["code"] in (
            "path-missing",
            "usage",
            "out-of-range",
        )


def test_a_passage_that_is_not_there_is_not_found(server):
    for path in ("/api/passages/0123456789abcdef", "/api/passages/x/similar"):
        answer = server.get(path)
        assert answer.status_code == 404 and "no passage" in problem(answer)["what"]


def test_topics_group_every_document_and_narrow_a_search(server):
    topics = server.get("/api/topics").json()["topics"]
    assert sum(topic["documents"] for topic in topics) == len(texts()) and len(topics) > 1
    assert [topic["number"] for topic in topics] == [*range(len(topics))]
    every = {result["id"] for result in search(server, "a river text", k=50)["results"]}
    of_topics = []
    for topic in topics:
        answer = search(server, "a river text", k=50, topic=topic["number"])
        assert answer["total"] <= topic["documents"]
        of_topics += [result["id"] for result in answer["results"]]
    assert sorted(of_topics) == sorted(every)
    unknown = server.get("/api/search?q=a&topic=99")
    assert unknown.status_code == 422 and "/api/topics" in problem(unknown)["remedy"]
    assert server.get("/api/search?q=a&topic=-1").status_code == 422


def test_documents_are_listed_page_by_page_and_filtered(server):
    first = server.get("/api/documents?k=20").json()
    rest = server.get("/api/documents?k=20&offset=20").json()
    listed = first["documents"] + rest["documents"]
    assert first["total"] == len(listed) == len(texts())
    assert [document["title"] for document in listed] == [text.title for text in texts()]
    opened = server.get(f"/api/passages/{listed[0]['id']}").json()
    assert opened["title"] == listed[0]["title"]
    assert server.get("/api/documents?lang=he").json()["total"] == 1


def test_server_serves_about_health_and_report(server):
    about = server.get("/api/about").json()
    assert about["name"] == "papers" and about["index"]["documents"] == len(texts())
    assert about["fields"] == ["origin", "title", "kind", "lang"] and about["report"] is True
    assert about["trouble"] is None and about["limits"]["k"] == 100
    assert server.get("/healthz").json() == {"status": "ok"}
    report = server.get("/report")
    assert (
        "it went well" in report.text
        and "sandbox allow-scripts" in report.headers["content-security-policy"]
    )


def test_the_model_writes(server):
    form = {"prompt": "The river", "tokens": 3, "temperature": 0, "top_k": 5, "seed": 1}
    assert server.post("/api/generate", form).json() == {
        "prompt": "The river",
        "text": " word1 word2 word3",
    }
    assert server.post("/api/generate", {"tokens": 1}).json()["prompt"] == ""


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"tokens": 513}', 422, "at most 512"),
        (b'{"tokens": 0}', 422, "tokens"),
        (b'{"tokens": "many"}', 422, "tokens"),
        (b'{"promt": "a"}', 422, "use prompt instead of promt"),
        (b'{"prompt": "' + b"a" * 8001 + b'"}', 422, "at most 8,000"),
        (b'{"prompt": ', 400, "JSON"),
        (b'{"prompt": "\xff"}', 400, "JSON"),
        (b"", 400, "JSON"),
        (b"[" * 100_000, 422, "the body"),
    ],
)
def test_a_body_that_cannot_be_is_refused(server, body, status, words):
    answer = server.client.post(
        f"{server.url}/api/generate", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    assert words in " ".join(problem(answer).values())


def test_internal_error_is_answered_with_500_without_a_traceback(server):
    answer = server.get("/api/search", params={"q": "fault"})
    assert answer.status_code == 500 and problem(answer)["code"] == "fault"
    assert "secret" not in answer.text
    # The next request on the same connection would race its end.
    assert answer.headers["connection"] == "close"
    assert search(server, "river")["total"]


def test_another_way_to_ask_is_refused(server):
    asked = (
        ("PUT", "/api/search"),
        ("GET", "/api/generate"),
        ("DELETE", "/"),
        ("OPTIONS", "/api/search"),
    )
    for method, path in asked:
        headers = {"content-type": "application/json"}
        answer = server.client.request(method, server.url + path, headers=headers, content=b"{}")
        assert answer.status_code == 405, (method, path)
        problem(answer)


def test_many_at_once_get_their_own_answers(server):
    def ask(number: int) -> bool:
        name = RIVERS[number % len(RIVERS)]
        return search(server, f"{name} source", k=1)["results"][0]["title"] == f"The {name} source"

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(200)))


def test_the_schema_is_valid_and_true_of_the_answers(server):
    schema = server.get("/openapi.json").json()
    assert schema["openapi"].startswith("3.1")
    registry = Registry().with_resource("urn:api", Resource.from_contents(schema, DRAFT202012))
    for one in schema["components"]["schemas"].values():
        Draft202012Validator.check_schema(one)
    refs = {
        ref.split('"')[0] for ref in json.dumps(schema).split('"$ref": "#/components/schemas/')[1:]
    }
    assert refs <= {*schema["components"]["schemas"]}
    some = search(server, "river", k=1)["results"][0]["id"]
    asked = {
        "/api/search": "/api/search?q=river",
        "/api/passages/{id}": f"/api/passages/{some}",
        "/api/passages/{id}/similar": f"/api/passages/{some}/similar",
        "/api/documents": "/api/documents",
        "/api/topics": "/api/topics",
        "/api/about": "/api/about",
        "/v1/models": "/v1/models",
        "/v1/models/{model}": "/v1/models/papers",
        "/healthz": "/healthz",
    }
    by_post = {"/api/ask", "/api/generate", "/v1/chat/completions", "/v1/completions"}
    by_post.add("/v1/embeddings")
    assert {*asked} | by_post == {*schema["paths"]}
    for path, address in asked.items():
        _check(schema["paths"][path]["get"], server.get(address), registry)
    _check(
        schema["paths"]["/api/generate"]["post"],
        server.post("/api/generate", {"prompt": "a"}),
        registry,
    )
    _check(
        schema["paths"]["/api/search"]["post"],
        server.post("/api/search", {"q": "river"}),
        registry,
    )
    prompted = {"model": "papers", "prompt": "a"}
    completed = server.post("/v1/completions", prompted)
    _check(schema["paths"]["/v1/completions"]["post"], completed, registry)
    messages = [{"role": "user", "content": "a"}]
    chatted = server.post("/v1/chat/completions", {"model": "papers", "messages": messages})
    _check(schema["paths"]["/v1/chat/completions"]["post"], chatted, registry)
    form = {"model": "papers", "input": "a"}
    _check(schema["paths"]["/v1/embeddings"]["post"], server.post("/v1/embeddings", form), registry)
    _check(schema["paths"]["/api/search"]["get"], server.get("/api/search?q="), registry)


def _check(told: dict, answer, registry: Registry) -> None:
    wanted = told["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    wanted = {"$ref": f"urn:api{wanted['$ref']}"}
    Draft202012Validator(wanted, registry=registry).validate(answer.json())


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("lang=en,he", {"lang": ["en", "he"]}),
        ("lang=en&kind!=note", {"lang": "en", "kind": {"not": "note"}}),
        ("where.lang!=en", ["lang!=en"]),
        ("title=The Rhine mouth", {"title": "The Rhine mouth"}),
    ],
)
def test_filters_in_an_address_are_those_of_a_body(server, address, where):
    got = server.get(f"/api/search?q=a river text&k=50&{address}").json()
    asked = server.post("/api/search", {"q": "a river text", "k": 50, "where": where}).json()
    assert got["total"] == asked["total"] > 0
    assert got == asked
