"""Files that farspan writes itself: not through links, and text of the cache for its user alone."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal
from farspan.domain.run import make_cache_folder
from farspan.domain.struct_files import cut_unfinished_line, write_atomically


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """A file of the user's own that no link may lead to."""
    path = tmp_path / "diary.txt"
    path.write_text("dear diary")
    return path


@pytest.mark.parametrize("mode", ["wb", "ab", "rb+"])
def test_file_that_is_a_link_is_refused_and_what_it_leads_to_stays(
    diary: Path, tmp_path: Path, mode: str
) -> None:
    link = tmp_path / "it's a link"
    link.symlink_to(diary)
    with pytest.raises(Refusal) as refusal:
        open_own(link, mode)  # type: ignore[arg-type]
    assert refusal.value.problem.code == "path-unusable"
    assert str(diary) in refusal.value.problem.fact
    assert diary.read_text() == "dear diary"
    # The fix of the message puts the link aside, and loses nothing.
    subprocess.run(refusal.value.problem.remedy, shell=True, check=True, cwd=tmp_path)
    assert not os.path.lexists(link)
    assert diary.read_text() == "dear diary"


def test_a_dangling_link_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for mode in ("wb", "ab"):
        with pytest.raises(Refusal, match="path-unusable"):
            open_own(tmp_path / "link", mode)
    assert not (tmp_path / "elsewhere").exists()


def test_files_in_a_linked_folder_are_opened(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    with open_own(tmp_path / "checkpoints" / "part", "wb") as file:
        file.write(b"weights")
    assert (tmp_path / "scratch" / "part").read_bytes() == b"weights"


def test_links_under_the_names_of_temporary_files_are_not_written_through(
    diary: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    (tmp_path / f"report.html.{os.getpid()}.tmp").symlink_to(diary)
    write_atomically(path, b"page")
    assert (path.read_bytes(), path.is_symlink()) == (b"page", False)
    path.unlink()
    path.symlink_to(diary)
    write_atomically(path, b"page")
    assert (path.read_bytes(), path.is_symlink()) == (b"page", False)
    assert diary.read_text() == "dear diary"


def test_events_behind_a_link_are_not_cut(diary: Path, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(diary)
    with pytest.raises(Refusal, match="path-unusable"):
        cut_unfinished_line(tmp_path / "events.jsonl")
    assert diary.read_text() == "dear diary"


# -- the cache
#   ------------------------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder where nothing of farspan's is."""
    for name in ("FARSPAN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_own_cache_is_for_its_user_alone_also_where_an_earlier_version_made_it(home: Path) -> None:
    own = home / ".cache" / "farspan"
    assert make_cache_folder("corpora") == own / "corpora"
    assert mode_of(own) == 0o700
    own.chmod(0o755)
    make_cache_folder("trials")
    assert mode_of(own) == 0o700


def test_own_cache_where_xdg_says_is_for_its_user_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    make_cache_folder("corpora")
    assert mode_of(home / "elsewhere" / "farspan") == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o2775, 0o750])
def test_a_cache_that_is_given_keeps_its_mode(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    group = home / "group"
    group.mkdir()
    group.chmod(mode)
    monkeypatch.setenv("FARSPAN_CACHE", str(group))
    assert make_cache_folder("corpora") == group / "corpora"
    assert mode_of(group) == mode


def test_a_group_s_cache_behind_a_link_in_the_user_s_keeps_its_mode(home: Path) -> None:
    (home / "group").mkdir(mode=0o755)
    (home / ".cache").mkdir()
    (home / ".cache" / "farspan").symlink_to(home / "group")
    make_cache_folder("corpora")
    assert (home / "group" / "corpora").is_dir()
    assert mode_of(home / "group") == 0o755


def test_a_cache_that_is_given_and_not_there_is_made_for_its_user_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARSPAN_CACHE", str(home / "data" / "cache"))
    make_cache_folder("corpora")
    assert mode_of(home / "data" / "cache") == 0o700


def test_the_cache_of_a_host_inside_the_user_s_is_for_its_user_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a launcher says to workers on a host with a disk of its own.
    monkeypatch.setenv("FARSPAN_CACHE", "~/.cache/farspan/cache")
    (home / ".cache" / "farspan" / "cache").mkdir(parents=True, mode=0o755)
    make_cache_folder("corpora")
    assert mode_of(home / ".cache" / "farspan") == 0o700


def test_a_given_cache_needs_no_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_CACHE", str(home / "given"))
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # As for a user id of a container.
    assert make_cache_folder("corpora") == home / "given" / "corpora"
