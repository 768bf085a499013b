"""`farspan export --push` against a server with the routes of the Hugging Face hub."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farspan.cli.main import main
from farspan.domain.run import RunFolder
from tests.hub_server import Hub, Repository, serve_hub
from tests.waiting import LIMIT_S

pytest.importorskip("torch")
pytest.importorskip("transformers")
from huggingface_hub import constants

from tests.app.instructed import make_instructed_run

TOKEN = "hf_write"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return make_instructed_run(tmp_path_factory.mktemp("push"))[0]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that the library of this process asks, with a token that may write."""
    with serve_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server


def read_files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def download(
    hub: Hub, name: str, folder: Path, token: str = ""
) -> subprocess.CompletedProcess[str]:
    """Download a repository in a process that has the hub's address and a token from its
    environment."""
    code = (
        "import sys; from huggingface_hub import snapshot_download; "
        "snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token}
    environment["HF_HOME"] = str(folder.with_name("home"))
    return subprocess.run(
        [sys.executable, "-c", code, name, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def push(run: RunFolder, out: Path, name: str, *options: str) -> int:
    return main(["export", str(run.path), "--out", str(out), "--push", name, *options])


def test_pushed_folder_is_downloaded_file_by_file(run, hub, tmp_path, capsys):
    out = tmp_path / "out"
    assert push(run, out, "me/papers") == 0
    printed = capsys.readouterr()
    assert f"uploaded it to {hub.url}/me/papers" in printed.out
    assert hub.repositories["me/papers"].private
    assert download(hub, "me/papers", tmp_path / "there", TOKEN).returncode == 0
    assert read_files(tmp_path / "there") == read_files(out)
    assert "additional_chat_templates/tool_use.jinja" in read_files(out)
    assert "RepositoryNotFound" in download(hub, "me/papers", tmp_path / "nobody").stderr
    assert hub.repositories["me/papers"].commits == 1
    # The token is in nothing that was written or printed.
    written = [*read_files(out).values(), *read_files(run.path).values()]
    assert not any(TOKEN.encode() in content for content in written)
    assert TOKEN not in printed.out + printed.err


def test_public_repository_is_made_where_it_is_asked_for(run, hub, tmp_path):
    assert push(run, tmp_path / "out", "lab/papers", "--public") == 0
    assert download(hub, "lab/papers", tmp_path / "there").returncode == 0
    assert read_files(tmp_path / "there") == read_files(tmp_path / "out")


def test_second_push_leaves_no_weights_of_the_first(run, hub, tmp_path):
    shards = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    before = dict.fromkeys([*shards, "notes.txt", ".gitattributes"], b"old")
    hub.repositories["me/papers"] = Repository(private=True, files=before)
    assert push(run, tmp_path / "out", "me/papers") == 0
    expected = read_files(tmp_path / "out") | {"notes.txt": b"old", ".gitattributes": b"old"}
    assert hub.repositories["me/papers"].files == expected


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("papers", (), "out-of-range", "--push OWNER/NAME"),
        ("me/a/b", (), "out-of-range", "an owner, a slash and a name"),
        ("me/../b", (), "out-of-range", "--push OWNER/NAME"),
        ("me/a--b", (), "out-of-range", "--push OWNER/NAME"),
        ("me/" + "a" * 96, (), "out-of-range", "96 characters"),
        ("somebody/papers", (), "hub-unusable", "--push me/papers"),
        ("guests/papers", (), "hub-unusable", "may not write to repositories of guests"),
        ("me/public", (), "hub-unusable", "--push me/public --public"),
        ("me/private", ("--public",), "hub-unusable", "exists and is private"),
        ("me/papers", ("--format", "gguf"), "out-of-range", "hf upload me/papers"),
    ],
)
def test_upload_that_cannot_be_is_refused_before_the_export(
    name, options, code, words, run, hub, tmp_path, capsys
):
    hub.repositories = {"me/public": Repository(False), "me/private": Repository(True)}
    assert push(run, tmp_path / "out", name, *options) != 0
    printed = capsys.readouterr().err
    assert f"error[{code}]" in printed and words in printed
    assert not (tmp_path / "out").exists()
    assert not any("create" in request or "commit" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("hf_wrong", "fix:   unset HF_TOKEN && hf auth login"),
        ("hf_read", "fix:   unset HF_TOKEN && hf auth login"),
        ("", "fix:   hf auth login"),
    ],
)
def test_token_that_may_not_write_is_refused_before_the_export(
    token, words, run, hub, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", token)
    assert push(run, tmp_path / "out", "me/papers") == 68
    printed = capsys.readouterr()
    assert words in printed.err
    assert not token or token not in printed.err + printed.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["closed", "offline", "broken"])
def test_hub_that_cannot_be_asked_is_refused_before_the_export(
    how, run, hub, tmp_path, capsys, monkeypatch
):
    if how == "closed":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
    elif how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        hub.statuses = {"whoami": 500}
    assert push(run, tmp_path / "out", "me/papers") == 68
    printed = capsys.readouterr().err
    fix = printed.partition("fix:")[2]
    assert f"farspan export {run.path}" in fix and "--push" not in fix
    assert TOKEN not in printed and not (tmp_path / "out").exists()


def test_public_without_push_is_refused(run, capsys):
    assert main(["export", str(run.path), "--public"]) == 2
    assert "--push OWNER/NAME" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("where", ["POST .*create", "PUT /upload", "POST .*/commit/"])
def test_hub_that_ends_in_the_middle_gets_nothing_and_the_fix_uploads_the_folder(
    where, run, hub, tmp_path, capsys
):
    old = {"README.md": b"old", "model-00001-of-00002.safetensors": b"old"}
    hub.repositories = {"me/papers": Repository(True, dict(old))}
    hub.dies_at = where
    out = tmp_path / "out"
    assert push(run, out, "me/papers") == 68
    printed = capsys.readouterr().err
    assert "the exported folder is whole" in printed and TOKEN not in printed
    assert hub.repositories["me/papers"].files == old
    hub.dies_at = None
    words = shlex.split(printed.partition("fix:")[2].strip())
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HOME"] = str(tmp_path / "home")
    program = Path(sys.executable).with_name(words[0])
    done = subprocess.run(
        [program, *words[1:]], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert hub.repositories["me/papers"].files == read_files(out)


@pytest.mark.slow
def test_model_of_the_hub_is_continued_with_its_card_and_licence(run, hub, tmp_path):
    """Also: no pickled weights are fetched, and no weights for a plan."""
    model = read_files(run.path.parent / "small-instruct") | {"pytorch_model.bin": b"pickle"}
    hub.repositories = {"somebody/small": Repository(False, model)}
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    small = ["--set", "parallel.workers=1", "--set", "train.steps=1"]
    asked = [str(run.path.parent / "run.yaml"), "--from", "somebody/small", *small]

    def farspan(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "farspan", *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr

    farspan("plan", *asked)
    fetched = [request for request in hub.requests if "/resolve/" in request]
    assert any("LICENSE.txt" in request for request in fetched)
    assert not any("safetensors" in request for request in fetched)
    farspan("train", *asked, "--run", "run")
    farspan("export", "run", "--out", "out")
    assert not any("pytorch_model" in request for request in hub.requests)
    exported = read_files(tmp_path / "out")
    assert b"base_model: somebody/small\n" in exported["README.md"]
    for name in ("LICENSE.txt", "Notice", "additional_chat_templates/tool_use.jinja"):
        assert exported[name] == model[name]


@pytest.mark.slow
def test_address_and_token_come_from_the_environment(run, hub, tmp_path):

    stored = tmp_path / "home" / "token"
    stored.parent.mkdir()
    stored.write_text(TOKEN)
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(stored.parent), "HF_TOKEN": ""}
    words = ["export", str(run.path), "--out", str(tmp_path / "out"), "--push", "me/papers"]
    done = subprocess.run(
        [sys.executable, "-m", "farspan", *words, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert f'"url":"{hub.url}/me/papers"' in done.stdout
    assert hub.repositories["me/papers"].files == read_files(tmp_path / "out")
