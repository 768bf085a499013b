"""Links in run folders and caches, by command: of somebody else they are refused, a user's own
are followed, and no file is written through one."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Farspan

WRITING = [
    ("resume", "{run}"),
    ("resume", "{run}", "--detach"),
    ("report", "{run}"),
    ("embed", "{run}", "--no-eval"),
    ("tune", "{run}"),
    ("export", "{run}"),
]


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """A file of the user's own, that no link may lead to."""
    path = tmp_path / "home" / "diary.txt"
    path.parent.mkdir()
    path.write_text("dear diary")
    return path


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """A run of this user's own that has everything still to train."""
    copy = shutil.copytree(run, tmp_path / "own")
    shutil.rmtree(copy / "checkpoints")
    shutil.rmtree(copy / "index", ignore_errors=True)
    for name in ("events.jsonl", "report.html", "job.json"):
        (copy / name).unlink(missing_ok=True)
    return copy


@pytest.fixture
def foreign(own: Path) -> Path:
    """The same from somebody else, whose seal means nothing here."""
    (own / "seal").write_text("0" * 64)
    return own


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
@pytest.mark.parametrize("name", ["logs/rank-0.log", "checkpoints", "index/x/y"])
def test_a_run_from_elsewhere_that_holds_links_is_refused(
    here: Farspan, foreign: Path, diary: Path, words: tuple[str, ...], name: str
) -> None:
    link = foreign / name
    target = diary.parent if name == "checkpoints" else diary
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    before = sorted(foreign.rglob("*"))
    done = here(*(word.format(run=foreign) for word in words))
    assert done.returncode == 42, done.stderr
    assert f"{name} -> {target}" in done.stderr and "--trust" in done.stderr
    assert diary.read_text() == "dear diary"
    assert sorted(foreign.rglob("*")) == before and len(list(diary.parent.iterdir())) == 1


def test_a_folder_that_hides_its_names_is_not_taken_for_one_without_links(
    here: Farspan, foreign: Path, diary: Path
) -> None:
    (foreign / "logs" / "rank-0.log").unlink()
    (foreign / "logs" / "rank-0.log").symlink_to(diary)
    (foreign / "logs").chmod(0o300)
    if os.access(foreign / "logs", os.R_OK):
        pytest.skip("root lists every folder")
    done = here("report", str(foreign))
    (foreign / "logs").chmod(0o700)
    assert done.returncode == 32, done.stderr


def test_no_file_is_written_through_a_link_also_in_a_run_that_is_trusted(
    farspan: Farspan, foreign: Path, diary: Path
) -> None:
    link = foreign / "logs" / "rank-0.log"
    link.unlink()
    link.symlink_to(diary)
    done = farspan("resume", str(foreign), "--trust")
    assert done.returncode == 32, done.stderr
    assert f"mv -- {link} {link}.link" in done.stderr
    assert diary.read_text() == "dear diary"
    link.rename(f"{link}.link")
    # What was trusted once stays so, and another file of that folder is no link's.
    (foreign / "logs" / "job.log").symlink_to(diary)
    done = farspan("resume", str(foreign), "--detach")
    assert done.returncode == 32, done.stderr
    assert diary.read_text() == "dear diary"


@pytest.mark.slow
def test_a_user_s_own_linked_folders_go_on_working(
    farspan: Farspan, own: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    scratch = tmp_path / "scratch"
    other = tmp_path / "other"
    for folder in (disk, scratch, other):
        folder.mkdir()
    own = own.rename(disk / "docs")
    (tmp_path / "runs").symlink_to(disk)
    (own / "checkpoints").symlink_to(scratch)
    (own / "index").symlink_to(other)
    run = str(tmp_path / "runs" / "docs")
    for words in (("resume", run), ("embed", run, "--no-eval"), ("report", run)):
        done = farspan(*words)
        assert done.returncode == 0, done.stderr
    assert list(scratch.glob("step-*")) and (other / "index.json").exists()
    assert (own / "checkpoints").is_symlink() and (own / "index").is_symlink()


# -- the cache
#   ------------------------------------------------------------------------------------------------


def test_prepared_text_is_for_its_user_alone(here: Farspan, tmp_path: Path) -> None:
    home = tmp_path / "home"
    cache = tmp_path / "home" / ".cache" / "farspan"
    (cache / "corpora").mkdir(parents=True)  # As an earlier version left it.
    cache.chmod(0o755)
    done = here("prepare", FARSPAN_CACHE="", XDG_CACHE_HOME="", HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert list(cache.glob("corpora/*/train.bin"))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_given_cache_keeps_its_mode(here: Farspan, tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    group.chmod(0o2775)
    done = here("prepare", FARSPAN_CACHE=str(group))
    assert done.returncode == 0, done.stderr
    assert list(group.glob("corpora/*/train.bin"))
    assert stat.S_IMODE(group.stat().st_mode) == 0o2775
