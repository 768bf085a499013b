"""A worker killed at any instant of a save leaves a folder of checkpoints that can be read;
manifests that anything was changed in are damage with a reason, never a crash or a reader of other
files."""

from __future__ import annotations

import itertools
import json
import os
import random
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

from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.manifest import MANIFEST, Corrupt, TrainingProgress, checksum_of
from tests.runtime import stored_tensors

#: Instants of saves at which their process is killed. `python -m tests.runtime.test_writer_killed
#: 500` takes a minute.
KILLS = 100


def save_for_ever(folder: Path, step: int, begun: int) -> None:
    """Save step after step, saying of each that it begins."""
    tensors = {f"{kind}/w": torch.randn(300, 400) for kind in ("model", "exp_avg", "exp_avg_sq")}
    for number in itertools.count(step):
        os.write(begun, b".")
        stored_tensors.write(
            folder, tensors, TrainingProgress(step=number, plan="p", elapsed_s=1.0), keep=2
        )


def kill_saves(folder: Path, kills: int) -> int:
    """Start to save, kill that at a random instant, and see that what is there is whole, so many
    times. How often the kill met a save half way."""
    rng, step, remains = random.Random(29), 1, 0
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
        checkpoint.mend(folder)
        assert not list(folder.glob(".*"))
        newest, *older = checkpoint.newest_first(folder)
        begun_step, step = step + saves - 1, checkpoint.verify(newest).step + 1
        assert step >= begun_step and all(checkpoint.verify(path) for path in older)
    return remains


@pytest.mark.slow
def test_a_save_that_is_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    # In a process of its own, which has no threads to lose when it forks.
    words = [sys.executable, "-m", "tests.runtime.test_writer_killed", str(KILLS), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > KILLS / 10, "kills that met no save show nothing"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "model/a": torch.randn(7, 5),
        "model/b": torch.randn(3),
        "exp_avg/a": torch.randn(7, 5),
    }
    progress = TrainingProgress(step=3, plan="p", training="t", elapsed_s=1.0)
    return stored_tensors.write(tmp_path_factory.mktemp("whole"), tensors, progress)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data(), value=ANYTHING, vouched=st.booleans())
def test_a_manifest_in_which_anything_was_changed_is_read_as_it_was_or_refused(
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
        weights, progress, _ = checkpoint.read_weights(path, {"model/a": (7, 5), "model/b": (3,)})
    except Corrupt:
        return
    assert progress.step >= 0
    assert torch.equal(weights["a"], wanted["model/a"]) and torch.equal(
        weights["b"], wanted["model/b"]
    )


def test_a_part_of_a_large_tensor_is_read_by_the_block(tmp_path: Path) -> None:
    values = torch.randn(4096, 512)  # 8 MiB, 32 blocks
    progress = TrainingProgress(step=1, plan="p", elapsed_s=1.0)
    path = stored_tensors.write(tmp_path, {"model/w": values}, progress)
    with stored_tensors.Stored(path, checkpoint.read(path).tensors) as stored:
        part = torch.empty(1000, 512)
        stored.fill("model/w", (1500, 0), part)
        assert torch.equal(part, values[1500:2500])
        assert stored.read_bytes <= part.nbytes + 2 * 2**18
        columns = torch.empty(64, 100)
        stored.fill("model/w", (10, 17), columns)
        assert torch.equal(columns, values[10:74, 17:117])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        kill_saves(
            Path(sys.argv[2]) if sys.argv[2:] else Path(tempfile.mkdtemp()), int(sys.argv[1])
        )
    )
