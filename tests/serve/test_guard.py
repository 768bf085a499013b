"""Who may ask: other sites' pages and names, the token, and sizes."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from tests.serve.conftest import Held, Server
from tests.serve.test_api import problem
from tests.waiting import LIMIT_S

TOKEN = "0123456789abcdef-the-token"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    from tests.serve.conftest import make_run, running

    with running(
        make_run(tmp_path_factory.mktemp("guarded") / "papers"), host="0.0.0.0", token=TOKEN
    ) as server:
        yield server


def raw(server: Server, head: str, body: bytes = b"") -> bytes:
    """What the server answers to bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
            if b"}}" in answer:
                break
        return answer


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "a@evil"]
)
def test_request_with_a_foreign_host_header_is_refused(server, host):
    """DNS rebinding: a name of somebody else's that leads here."""
    answer = raw(server, f"GET /api/search?q=river HTTP/1.1\nHost: {host}\nConnection: close")
    assert answer.split()[1] in (b"403", b"400"), answer
    assert b"Rhine" not in answer


def test_request_with_a_local_host_header_is_accepted(server):
    for host in ("localhost", f"localhost:{server.port}", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert server.get("/api/search?q=river", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost:3000",
        "http://127.0.0.1",
        "file://",
        "http://[",
    ],
)
@pytest.mark.parametrize("path", ["/api/generate", "/v1/embeddings", "/api/search"])
def test_a_page_of_another_site_gets_403(server, origin, path):
    for method in ("POST", "GET"):
        headers = {"origin": origin, "content-type": "application/json"}
        answer = server.client.request(
            method, f"{server.url}{path}", headers=headers, content=b"{}"
        )
        assert answer.status_code == 403
        assert "another site" in problem(answer)["what"]
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_request_from_the_servers_own_origin_is_accepted(server):
    headers = {"origin": server.url, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    assert server.post("/api/generate", {"tokens": 1}, headers=headers).status_code == 200


def test_a_request_without_cors_from_another_site_is_refused_and_a_link_followed(server):
    for site in ("cross-site", "same-site"):
        image = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
        assert server.get("/api/search?q=river", headers=image).status_code == 403
        link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
        assert server.get("/", headers=link).status_code == 200
        assert server.get("/api/search?q=river", headers=link).status_code == 403


def test_request_body_without_json_content_type_gets_415(server):
    """A form of another site can send text, but not this without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = server.client.post(
            f"{server.url}/api/generate", content=b"{}", headers={"content-type": kind}
        )
        assert (
            answer.status_code == 415
            and "content-type: application/json" in problem(answer)["remedy"]
        )


def test_request_with_too_large_body_gets_413(server):
    for content in (b'{"prompt": "' + b"a" * 1_000_000 + b'"}', iter([b"a" * 400_000] * 4)):
        answer = server.client.post(
            f"{server.url}/api/generate",
            content=content,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 413 and "at most 1,000,000" in problem(answer)["fact"]
    assert server.get("/healthz").status_code == 200


@pytest.mark.parametrize("size", [33_000, 80_000, 1_000_000])
@pytest.mark.parametrize("header", ["cookie", "x-more", "origin", "authorization"])
def test_head_above_32_kb_gets_431_with_the_form_of_a_refusal(guarded, header, size):
    """Also before a token is asked for, and though the client sends all of it first."""
    with httpx.Client(base_url=guarded.url, timeout=LIMIT_S, trust_env=False) as anybody:
        for path in ("/healthz", "/api/search?q=river", "/v1/models"):
            answer = anybody.get(path, headers={header: "\\" * size})
            assert answer.status_code == 431
            told = problem(answer)
            assert told["code"] == "out-of-range" and "at most 32,000 bytes" in told["fact"]
            assert "POST /api/search" in told["remedy"]
            assert ("error" in answer.json()) == path.startswith("/v1/")
            assert answer.headers["x-content-type-options"] == "nosniff"
    assert guarded.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "lines",
    [
        [f"GET /api/search?q={'a' * 1_000_000} HTTP/1.1", "Host: localhost"],
        ["GET / HTTP/1.1", "Host: localhost", *["a: b"] * 8_000],
        ["GET / HTTP/1.1", f"Host: {'a' * 33_000}"],
    ],
)
def test_long_address_and_many_headers_get_431(server, lines):
    answer = raw(server, "\n".join(lines))
    assert answer.split()[1] == b"431" and b"at most 32,000 bytes" in answer


def test_head_above_32_kb_that_never_ends_gets_431(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.split()[1] == b"431" and answer.endswith(b"}")


def test_client_that_sends_on_after_431_is_cut_off(start):
    server = start(limits={"body_bytes": 1_000, "body_s": 600.0})
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000)
        assert connection.recv(100).split()[1] == b"431"
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                connection.sendall(b"a" * 100_000)


def test_head_just_below_32_kb_is_read(server):
    answer = server.get("/api/search?q=river", headers={"x-more": "a" * 31_500})
    assert answer.status_code == 200


def test_no_cookie_is_parsed_by_pythons_library(server, guarded):
    """tests/serve/serving.py makes that a fault, so that it would be answered with 500."""
    cookie = 'a="' + "\\" * 30_000 + '"'
    for path, status in (("/healthz", 200), ("/api/search?q=river", 401), ("/", 401)):
        with httpx.Client(base_url=guarded.url, trust_env=False) as anybody:
            assert anybody.get(path, headers={"cookie": cookie}).status_code == status
    for path in ("/healthz", "/api/search?q=river", "/", "/v1/models"):
        assert server.get(path, headers={"cookie": cookie}).status_code == 200


@pytest.mark.parametrize(
    ("cookies", "status"),
    [
        ("farspan_{port}={token}", 200),
        # Browsers keep one jar for all ports, and other programs put anything into it.
        ('a={{"b": 1}}; c="\\\\"; d; =e;;farspan_{port}={token};f="', 200),
        ("farspan_{port}=other; farspan_{port}={token}", 200),
        ("farspan_{port}={token}x", 401),
        ("farspan_1={token}", 401),
        ("xfarspan_{port}={token}", 401),
        ('a="; farspan_{port}"={token}', 401),
        ("farspan_{port}", 401),
        ("{token}", 401),
        ("", 401),
    ],
)
def test_token_is_found_among_cookies_of_any_form(guarded, cookies, status):
    cookie = cookies.format(port=guarded.port, token=TOKEN)
    with httpx.Client(base_url=guarded.url, trust_env=False) as browser:
        answer = browser.get("/api/search?q=river", headers={"cookie": cookie})
    assert answer.status_code == status


def test_a_body_that_does_not_come_is_not_waited_for(start):
    server = start(limits={"body_s": 0.3})
    head = (
        "POST /api/generate HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
        "Content-Length: 9"
    )
    assert raw(server, head, b"{").split()[1] == b"408"


def test_a_head_that_does_not_come_is_not_waited_for(start):
    server = start(limits={"head_s": 2.0})
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as slow:
        slow.sendall(whole[:20])
        assert slow.recv(100) == b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as kept:
        for _ in range(2):
            # A client that has asked before may think for longer.
            kept.sendall(whole)
            answer = b""
            while b'"ok"' not in answer:
                answer += (part := kept.recv(4096))
                assert part, answer
            time.sleep(2.5)
        kept.sendall(whole[:20])
        assert kept.recv(100) == b""
    # An answer may take longer too.
    held = Held(server, "longer").wait_until_begun()
    time.sleep(2.5)
    held.free()
    assert held.answer().status_code == 200


def test_server_survives_bytes_that_are_not_http(server):
    for noise in (
        b"\x00" * 100 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(4096):
                answer += part
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split()[1] in (b"400", b"403") and b"application/json" in head
            assert json.loads(body)["problem"]["code"] == "usage"
    assert server.get("/healthz").status_code == 200


def test_body_whose_chunks_cannot_be_read_gets_400(start):
    server = start()
    head = (
        "POST /api/generate HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
        "Transfer-Encoding: chunked"
    )
    for body in (b"zz\r\n", b"1\r\n{\r\n-1\r\n"):
        answer = raw(server, head, body)
        assert answer.split()[1] == b"400" and b"the request is not HTTP" in answer
    assert server.get("/healthz").status_code == 200
    server.process.terminate()
    assert server.process.communicate(timeout=LIMIT_S)[1] == ""


def test_without_the_token_nothing_of_the_run_is_seen(guarded):
    with httpx.Client(base_url=guarded.url, trust_env=False) as anybody:
        for path in (
            "/",
            "/api/search?q=river",
            "/api/about",
            "/report",
            "/openapi.json",
            "/v1/models",
            "/nix",
        ):
            answer = anybody.get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert "papers" not in answer.text
        page = anybody.get("/", headers={"accept": "text/html"})
        assert (
            page.status_code == 401 and "wants its token" in page.text and "papers" not in page.text
        )
        assert (
            anybody.get("/healthz").status_code
            == anybody.get("/static/look.css").status_code
            == 200
        )
        for wrong in (
            "Bearer x",
            f"Basic {TOKEN}",
            "Bearer",
            "Bearer \xff",
            f"Bearer {TOKEN}x",
            TOKEN,
        ):
            answer = anybody.get("/v1/models", headers={"authorization": wrong.encode("latin-1")})
            assert answer.status_code == 401 and "error" in answer.json()
    assert guarded.get("/api/search?q=river", headers={"host": "any.name"}).status_code == 200
    assert (
        guarded.get("/api/search?q=river", headers={"origin": "http://evil.example"}).status_code
        == 403
    )


def test_the_page_keeps_the_token_as_a_cookie(guarded):
    with httpx.Client(base_url=guarded.url, trust_env=False) as browser:
        assert browser.get("/?token=wrong").status_code == 401 and not browser.cookies
        answer = browser.get(f"/?q=a+b&token={TOKEN}&lang=en")
        assert answer.status_code == 303 and answer.headers["location"] == "/?q=a+b&lang=en"
        cookie = answer.headers["set-cookie"].lower()
        assert (
            "httponly" in cookie
            and "samesite=strict" in cookie
            and f"farspan_{guarded.port}=" in cookie
        )
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert browser.get("/api/search?q=river").status_code == 200
        assert browser.get("/report").status_code == 200
    schema = guarded.get("/openapi.json").json()
    assert schema["security"] == [{"token": []}]


def test_every_answer_has_its_headers(server):
    for path in ("/", "/api/about", "/nix", "/static/main.js", "/report"):
        headers = server.get(path).headers
        assert (
            headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        )
        assert headers["cross-origin-resource-policy"] == "same-origin" and "server" not in headers
        assert "default-src 'none'" in headers["content-security-policy"]
    policy = server.get("/").headers["content-security-policy"]
    assert (
        "script-src 'self';" in policy and "unsafe" not in policy and "default-src 'none'" in policy
    )
