"""Places that copies lie in: a folder, a host's own disk, S3. All keep the same promises."""

from __future__ import annotations

import http.server
import importlib.util
import io
import os
import random
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.problems import Refusal
from farspan.launch.copies import CopyError, CopyPlace, open_places, place_kind
from farspan.launch.copies.s3 import PART_BYTES
from farspan.launch.copies.site import hosts_for_copies
from farspan.launch.transfer_pacing import PACED_BYTES, PacedReader, Pacer, automatic_rate
from tests.environments import install_apart
from tests.launch.moto_server import MOTO, moto_server

CPU = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
MOST = 1000


def far_host(folder: Path, name: str = "far") -> Host:
    """A host with a disk of its own that is entered by a shell, and is gone while `gone` exists."""
    gate = f"[ -e {folder}/gone ] && exit 255"
    return Host(
        name=name,
        devices=(CPU,),
        enter=("sh", "-c", f'{gate}; exec "$@"', "sh"),
        folder=str(folder / "disk of its own"),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that speaks S3."""
    if importlib.util.find_spec("obstore") is None:
        pytest.skip("obstore is not installed: pip install 'farspan[s3]'")
    folder = tmp_path_factory.mktemp("moto")
    python = install_apart(MOTO, folder / "environment", "FARSPAN_TEST_MOTO")
    if python is None:
        pytest.skip("moto cannot be installed here")
    with moto_server(python, folder / "log") as address:
        yield address


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket's place, with the environment that lets farspan in."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name = f"bucket-{random.randrange(10**12)}"
    make = urllib.request.Request(f"{server}/{name}", method="PUT")
    with urllib.request.urlopen(make, timeout=60):
        return f"s3://{name}/some/where"


@pytest.fixture(params=["folder", "site", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> CopyPlace:
    """An empty place of each kind."""
    if request.param == "s3":
        location = request.getfixturevalue("bucket")
    elif request.param == "site":
        location = "site"
    else:
        location = str(tmp_path / "place")
        (tmp_path / "place").mkdir()
    assert place_kind(location) == request.param
    (opened,) = open_places(location, [far_host(tmp_path)])
    return opened


def put(place: CopyPlace, name: str, content: bytes) -> None:
    place.put_file(name, io.BytesIO(content), len(content))


def test_file_comes_back_as_it_was_put(place: CopyPlace) -> None:
    assert place.list_folders() == [] and place.list_files("a run-1") == {}
    content = random.Random(0).randbytes(PART_BYTES + 12345)
    put(place, "a run-1/checkpoints/step.1/part", content)
    put(place, "a run-1/run.json", b"{}")
    put(place, "other-2/run.json", b"")
    assert place.list_folders() == ["a run-1", "other-2"]
    sizes = {"checkpoints/step.1/part": len(content), "run.json": 2}
    assert place.list_files("a run-1") == sizes
    fetched = io.BytesIO()
    place.fetch_file("a run-1/checkpoints/step.1/part", fetched, len(content))
    assert fetched.getvalue() == content
    assert place.read_file("a run-1/run.json", MOST) == b"{}"
    assert place.read_file("other-2/run.json", MOST) == b""


def test_file_is_replaced_and_deleted(place: CopyPlace) -> None:
    put(place, "run-1/a", b"first")
    put(place, "run-1/a", b"second!")
    assert place.read_file("run-1/a", MOST) == b"second!"
    put(place, "run-1/c/b", b"b")
    place.delete_files(["run-1/a", "run-1/c/b", "run-1/nothing"])
    assert place.list_files("run-1") == {}


def test_file_that_is_missing_or_too_large_is_named(place: CopyPlace) -> None:
    put(place, "run-1/large", b"x" * (MOST + 1))
    assert place.read_file("run-1/small", MOST) is None
    with pytest.raises(CopyError, match="run-1/large has more than"):
        place.read_file("run-1/large", MOST)
    with pytest.raises(CopyError):
        place.fetch_file("run-1/large", io.BytesIO(), MOST + 100)
    with pytest.raises(CopyError):
        place.fetch_file("run-1/small", io.BytesIO(), 1)


@pytest.mark.parametrize("size", [100, PART_BYTES + 100])
def test_file_that_ends_early_leaves_the_one_before(place: CopyPlace, size: int) -> None:
    put(place, "run-1/a", b"before")
    with pytest.raises(CopyError):
        place.put_file("run-1/a", io.BytesIO(b"x" * (size - 50)), size)
    assert place.read_file("run-1/a", MOST) == b"before"
    assert place.list_files("run-1") == {"a": 6}


def test_checksum_is_of_what_is_stored(place: CopyPlace, tmp_path: Path) -> None:
    put(place, "run-1/a", b"hello")
    checksum = place.checksum("run-1/a")
    if checksum is not None:
        assert checksum == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
        (stored,) = tmp_path.rglob("run-1/a")
        stored.write_bytes(b"hellp")
        assert place.checksum("run-1/a") != checksum


def test_host_that_is_gone_is_named(tmp_path: Path) -> None:
    (place,) = open_places("site", [far_host(tmp_path)])
    put(place, "run-1/a", b"hello")
    (tmp_path / "gone").touch()
    for refused in (
        lambda: place.list_files("run-1"),
        lambda: place.read_file("run-1/a", MOST),
        lambda: put(place, "run-1/b", b"hello"),
        lambda: place.fetch_file("run-1/a", io.BytesIO(), 5),
    ):
        with pytest.raises(CopyError):
            refused()


def test_link_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "a.partial").symlink_to(tmp_path / "mine")
    (place,) = open_places(str(tmp_path), [])
    with pytest.raises(CopyError):
        put(place, "run-1/a", b"hello")
    assert (tmp_path / "mine").read_text() == "mine"


def test_copies_lie_in_another_site_where_there_is_one(tmp_path: Path) -> None:
    hosts = {name: far_host(tmp_path, name) for name in ("b1", "b2", "c1")}
    home = Host(name="a1", devices=(CPU,), enter=())
    sites = (
        Site(name="a", hosts=(home, hosts["b1"])),
        Site(name="b", hosts=(hosts["b2"],)),
        Site(name="c", hosts=(hosts["c1"],)),
    )
    names = [host.name for host in hosts_for_copies(Cluster(sites=sites), "a1")]
    assert names == ["b2", "c1", "b1"]
    # Rank 0's own disk holds the checkpoints already.
    names = [host.name for host in hosts_for_copies(Cluster(sites=sites), "b2")]
    assert names == ["c1", "b1"]
    assert hosts_for_copies(Cluster(sites=(Site(name="a", hosts=(home,)),)), "a1") == []


# -- S3
#   ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_missing_bucket_is_named(bucket: str) -> None:
    (place,) = open_places(f"{bucket.rpartition('-')[0]}-none", [])
    for refused in (
        place.list_folders,
        lambda: place.list_files("run-1"),
        lambda: place.read_file("run-1/a", MOST),
        lambda: put(place, "run-1/a", b"hello"),
    ):
        with pytest.raises(CopyError, match="no such bucket"):
            refused()


@pytest.mark.slow
def test_keys_of_a_profile_are_read(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    (tmp_path / ".aws").mkdir()
    credentials = tmp_path / ".aws" / "credentials"
    credentials.write_text("[lab]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (place,) = open_places(bucket, [])
    put(place, "run-1/a", b"hello")
    assert place.list_folders() == ["run-1"]


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("ExpiredToken", "the credentials have expired"),
        ("InvalidAccessKeyId", "the access key is not known there"),
        ("SignatureDoesNotMatch", "the secret key is wrong"),
        ("AccessDenied", "the credentials do not permit this"),
    ],
)
def test_credentials_that_a_server_refuses_are_named(
    code: str, meaning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")

    class Refusing(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = refuse  # noqa: N815

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{refusing.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        (place,) = open_places("s3://bucket/x", [])
        for refused in (place.list_folders, lambda: put(place, "run-1/a", b"hello")):
            with pytest.raises(CopyError, match=meaning):
                refused()
        refusing.shutdown()


def test_missing_credentials_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # No machine of Amazon's: nobody answers where such a machine would be asked.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    (place,) = open_places("s3://bucket", [])
    with pytest.raises(CopyError, match="no credentials"):
        place.list_folders()


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="no module named obstore") as refused:
        open_places("s3://bucket", [])
    assert refused.value.problem.code == "extra-missing"


# -- speed
#   ------------------------------------------------------------------------------------------------


class Time:
    """A clock that only waiting advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.now += seconds
        return False


def test_bytes_go_no_faster_than_the_rate(tmp_path: Path) -> None:
    time = Time()
    pacer = Pacer(1e6, time.clock, time.wait)
    path = tmp_path / "file"
    path.write_bytes(bytes(4_000_000))
    with open(path, "rb") as file:
        reader = PacedReader(file, 3_000_000, pacer)
        sent = 0
        while content := reader.read(700_000):
            sent += len(content)
            assert sent <= 1e6 * (time.now - 100.0) + 1
    assert sent == 3_000_000 == pacer.spent_bytes
    assert time.now == pytest.approx(103.0)
    # Time in which nothing was sent gives no burst afterwards.
    time.now += 60
    pacer.spend(PACED_BYTES)
    assert time.now == pytest.approx(163 + PACED_BYTES / 1e6)
    pacer.lift()
    pacer.spend(10**9)
    assert time.now == pytest.approx(163 + PACED_BYTES / 1e6)


def test_automatic_rate_takes_a_share_of_the_time_between_checkpoints() -> None:
    assert automatic_rate(600_000_000, 300, 0.5) == pytest.approx(4e6)
    # However rare checkpoints are, a copy ends.
    assert automatic_rate(600_000_000, 1e9, 0.5) == pytest.approx(1e6)
    assert automatic_rate(0, 300, 0.5) > 0
