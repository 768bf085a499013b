"""A worker killed at any instant of a save leaves a folder of checkpoints that can be read;
manifests that anything was changed in are damage with a reason, never a crash or a reader of other
files."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import MANIFEST, Corrupt, TrainerState, checksum_of
from tests.runtime import stored_tensors
from tests.waiting import LIMIT_S

#: Instants of saves at which their process is killed. `python -m tests.runtime.test_writer_killed
#: 500` takes a minute.
KILLS = 100


def save_for_ever(folder: Path, step: int, begun: int) -> None:
    """Save step after step, saying of each that it begins."""
    tensors = {f"{kind}/w": torch.randn(300, 400) for kind in ("model", "exp_avg", "exp_avg_sq")}
    for number in itertools.count(step):
        os.write(begun, b".")
        stored_tensors.write(
            folder,
            tensors,
            TrainerState(step=number, plan="p", training="t", elapsed_s=1.0),
            keep=2,
        )


def kill_saves(folder: Path, kills: int) -> int:
    """Start to save, kill that at a random instant, and see that what is there is whole, so many
    times. How often the kill met a save half way."""
    rng = random.Random(29)
    step = 1
    remains = 0
    for _ in range(kills):
        heard, begun = os.pipe()
        if (process := os.fork()) == 0:
            save_for_ever(folder, step, begun)
        saves = rng.randint(2, 4)
        assert len(b"".join(os.read(heard, 1) for _ in range(saves))) == saves
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(heard)
        os.close(begun)
        remains += bool(list(folder.glob(".*")))
        checkpoint_folder.clean_up(folder)
        assert not list(folder.glob(".*"))
        newest, *older = checkpoint_folder.newest_first(folder)
        begun_step = step + saves - 1
        step = checkpoint_folder.verify(newest).step + 1
        assert step >= begun_step and all(checkpoint_folder.verify(path) for path in older)
    return remains


#: What a save does to files, as Python audits it.
FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save_until_operation(folder: Path, number: int) -> None:
    """Save step 3 in this process, which is killed just before file operation `number`."""
    operations = itertools.count(1)

    def watch(event: str, arguments: object) -> None:
        if event in FILE_OPERATIONS and next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    values = {f"{kind}/w": torch.randn(30, 40) for kind in ("model", "exp_avg", "exp_avg_sq")}
    sys.addaudithook(watch)
    progress = TrainerState(step=3, plan="p", training="t", elapsed_s=1.0)
    stored_tensors.write(folder, values, progress, keep=2)


def kill_each_operation(folder: Path) -> list[int]:
    """Save step 3 beside steps 1 and 2, killed before each file operation in turn.

    Returns the newest step that could be read after each kill.
    """
    before = folder / "before"
    for step in (1, 2):
        values = {"model/w": torch.randn(30, 40)}
        progress = TrainerState(step=step, plan="p", training="t", elapsed_s=1.0)
        stored_tensors.write(before, values, progress, keep=2)
    found = []
    for number in itertools.count(1):
        saves = Path(shutil.copytree(before, folder / f"killed-{number}"))
        if (process := os.fork()) == 0:
            save_until_operation(saves, number)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        checkpoint_folder.clean_up(saves)
        assert not list(saves.glob(".*"))
        readable = [
            checkpoint_folder.verify(path).step for path in checkpoint_folder.newest_first(saves)
        ]
        assert readable[0] in (2, 3) and len(readable) >= 2
        if status == 0:
            assert readable == [3, 2]
            return found
        found.append(readable[0])


def test_save_killed_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    # In a process of its own, which has no threads to lose when it forks.
    words = [sys.executable, "-m", "tests.runtime.test_writer_killed", "operations", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    newest = done.stdout.split()
    # Up to the rename that completes it the step before is the newest, and afterwards this one.
    assert newest == sorted(newest) and {*newest} == {"2", "3"} and len(newest) > 8


@pytest.mark.slow
def test_a_save_that_is_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    # In a process of its own, which has no threads to lose when it forks.
    words = [sys.executable, "-m", "tests.runtime.test_writer_killed", str(KILLS), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > KILLS / 10, "kills that met no save show nothing"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "model/a": torch.randn(7, 5),
        "model/b": torch.randn(3),
        "exp_avg/a": torch.randn(7, 5),
    }
    progress = TrainerState(step=3, plan="p", training="t", elapsed_s=1.0)
    return stored_tensors.write(tmp_path_factory.mktemp("whole"), tensors, progress)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data(), value=ANYTHING, vouched=st.booleans())
def test_changed_checkpoint_manifest_gives_the_same_weights_or_is_refused(
    whole, data, value, vouched
) -> None:
    path = whole.parent / "best"
    path.mkdir(exist_ok=True)
    (path / "part-00000.safetensors").write_bytes((whole / "part-00000.safetensors").read_bytes())
    wanted = stored_tensors.tensors(whole)
    manifest = json.loads((whole / MANIFEST).read_bytes())
    at = manifest
    while isinstance(at, dict | list) and at:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            at[key] = value
            break
        at = at[key]
    if vouched:
        manifest["checksum"] = checksum_of(manifest.get("progress"), manifest.get("tensors"))
    (path / MANIFEST).write_text(json.dumps(manifest))
    try:
        weights, progress, _ = checkpoint_folder.read_weights(
            path, {"model/a": (7, 5), "model/b": (3,)}
        )
    except Corrupt:
        return
    assert progress.step >= 0
    assert torch.equal(weights["a"], wanted["model/a"]) and torch.equal(
        weights["b"], wanted["model/b"]
    )


def test_a_part_of_a_large_tensor_is_read_by_the_block(tmp_path: Path) -> None:
    values = torch.randn(4096, 512)  # 8 MiB, 32 blocks
    progress = TrainerState(step=1, plan="p", training="t", elapsed_s=1.0)
    path = stored_tensors.write(tmp_path, {"model/w": values}, progress)
    with stored_tensors.Stored(
        path, checkpoint_folder.read_checked_manifest(path).tensors
    ) as stored:
        part = torch.empty(1000, 512)
        stored.fill("model/w", (1500, 0), part)
        assert torch.equal(part, values[1500:2500])
        assert stored.read_bytes <= part.nbytes + 2 * 2**18
        columns = torch.empty(64, 100)
        stored.fill("model/w", (10, 17), columns)
        assert torch.equal(columns, values[10:74, 17:117])


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoints = Path(sys.argv[2]) if sys.argv[2:] else Path(tempfile.mkdtemp())
    if sys.argv[1] == "operations":
        print(*kill_each_operation(checkpoints))
    else:
        print(kill_saves(checkpoints, int(sys.argv[1])))
