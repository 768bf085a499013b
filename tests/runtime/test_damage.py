"""Damaged checkpoints: whatever is wrong with the newest, the run goes on from the one before, and
says why."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Started, Warned
from farspan.domain.struct_files import save
from farspan.domain.train import Muon
from farspan.runtime import inference
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import (
    CHECKSUM_BLOCK_BYTES,
    MANIFEST,
    TrainerState,
    checksum_of,
)
from farspan.runtime.checkpoint.save import Checkpointer
from farspan.runtime.checkpoint.slice_files import checksum_of_block
from farspan.runtime.comm.topology import Topology
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.parallel.executor import Executor
from tests import tiny
from tests.runtime import stored_tensors
from tests.runtime.test_trainer import TRAIN, Start

PART = "part-00000.safetensors"
FILES = (PART, MANIFEST)
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that wrote a checkpoint at every step, of which steps 2 to 4 are kept, and the best
    weights."""
    plan = tiny.plan(replace(TRAIN, steps=4, checkpoint_every_s=0.5, validate_every=2))
    start = Start(tiny.run_folder(tmp_path_factory.mktemp("whole") / "run", plan))
    assert start.train()[0] == "done"
    assert [
        checkpoint_folder.step_of(path)
        for path in checkpoint_folder.newest_first(start.run.checkpoints)
    ] == [4, 3, 2]
    return start.run


@pytest.fixture
def run(whole: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of it."""
    shutil.copytree(whole.path, tmp_path / "run")
    shutil.copytree(whole.path.parent / "corpus", tmp_path / "corpus")
    return RunFolder(tmp_path / "run")


@pytest.fixture(scope="module")
def executor(whole: RunFolder) -> Iterator[Executor]:
    with Group(0, 1, torch.device("cpu")):
        yield Executor(Topology(whole.load_plan(), 0), torch.device("cpu"))


def find(executor: Executor, folder: Path) -> tuple[int | None, list[str]]:
    """The step that a run goes on from, and what it says about those after it."""
    adopted = list[TrainerState]()
    said = list[str]()
    with Group(0, 1, torch.device("cpu")) as alone:
        there = Checkpointer(executor, folder, alone).restore(adopted.append, said.append)
    return (adopted[-1].step if there else None), said


# -- kinds of damage
#   ------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict], None], *, vouched: bool = False) -> None:
    """Change a manifest; with `vouched` its checksum is that of what it says then."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    change(manifest)
    if vouched:
        manifest["checksum"] = checksum_of(manifest["progress"], manifest["tensors"])
    (path / MANIFEST).write_text(json.dumps(manifest))


def vouch(path: Path) -> None:
    """Let the manifest name the checksums that the part's tensors have now, where they are still
    there."""
    held = {key: value.numpy().tobytes() for key, value in load_file(path / PART).items()}

    def change(manifest: dict) -> None:
        for name, tensor in manifest["tensors"].items():
            for part in tensor["slices"]:
                content = held.get(f"{name}@{','.join(map(str, part['at']))}", b"")
                part["sha256"] = [
                    checksum_of_block(content[at : at + CHECKSUM_BLOCK_BYTES])
                    for at in range(0, len(content), CHECKSUM_BLOCK_BYTES)
                ]

    rewrite(path, change, vouched=True)


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the tensors of the part; checksums match all the same."""

    def damage(path: Path) -> None:
        tensors = load_file(path / PART)
        change(tensors)
        save_file(tensors, path / PART)
        vouch(path)

    return damage


def overwrite(name: str, content: bytes) -> Damage:
    return lambda path: (path / name).write_bytes(content) and None


def progress(*, vouched: bool = True, **values: object) -> Damage:
    return lambda path: rewrite(
        path, lambda manifest: manifest["progress"].update(values), vouched=vouched
    )


def slices(name: str, change: Callable[[list[dict]], object]) -> Damage:
    """Change the slices that the manifest says a tensor has."""
    return lambda path: rewrite(
        path, lambda manifest: change(manifest["tensors"][name]["slices"]), vouched=True
    )


def high_byte(where: bytes) -> Damage:
    def damage(path: Path) -> None:
        content = (path / MANIFEST).read_bytes()
        assert where in content
        (path / MANIFEST).write_bytes(content.replace(where, where[:-1] + b"\xff", 1))

    return damage


def pipe(path: Path) -> None:
    (path / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)


def outside(path: Path) -> None:
    """The part lies beside the checkpoint, and the manifest leads there."""
    shutil.move(path / PART, path.parent / PART)
    text = (path / MANIFEST).read_text().replace(PART, f"../{PART}")
    (path / MANIFEST).write_text(text)
    rewrite(path, lambda manifest: None, vouched=True)


def linked(path: Path) -> None:
    """The part is a link that leads out of the checkpoint."""
    shutil.move(path / PART, path.parent / PART)
    (path / PART).symlink_to(path.parent / PART)


def forget(name: str) -> Damage:
    return lambda path: rewrite(path, lambda manifest: manifest["tensors"].pop(name), vouched=True)


def drop(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def halve(name: str) -> Damage:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def become_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no folder")


def become_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parent / "nowhere")


WEIGHT = "model/tok.weight"
MOMENT = "exp_avg/blocks.0.attn.out.bias"
#: Of what the best weights have too.
OF_WEIGHTS: dict[str, Damage] = {
    "a byte above 0x7f in a value": high_byte(b'"plan": "'),
    "a byte above 0x7f in a key": high_byte(b'"pro'),
    "a byte above 0x7f at first": overwrite(MANIFEST, b"\xff{}"),
    "an empty manifest": overwrite(MANIFEST, b""),
    "a manifest of another shape": overwrite(MANIFEST, b'{"progress": 1}'),
    "a manifest that is a list": overwrite(MANIFEST, b"[]"),
    "a manifest of brackets": overwrite(MANIFEST, b"[" * 100_000),
    "a manifest that is a pipe": pipe,
    "an empty part": overwrite(PART, b""),
    "a header that is refused": overwrite(PART, b"\xff" * 64),
    "a header beyond the file": overwrite(PART, (2**20).to_bytes(8, "little") + b"{}"),
    "a missing weight": retensor(lambda tensors: tensors.pop(f"{WEIGHT}@0,0")),
    "a weight of another shape": retensor(
        lambda tensors: tensors.update({f"{WEIGHT}@0,0": torch.zeros(33)})
    ),
    "a weight that the manifest does not name": forget(WEIGHT),
    "a slice twice": slices(WEIGHT, lambda parts: parts.append(parts[0])),
    "a slice elsewhere": slices(WEIGHT, lambda parts: parts[0].update(at=[1, 0])),
    "a slice of less": slices(WEIGHT, lambda parts: parts[0].update(shape=[1, 1])),
    "a slice of another number of dims": slices(WEIGHT, lambda parts: parts[0].update(at=[0])),
    "a slice without checksums": slices(WEIGHT, lambda parts: parts[0].update(sha256=[])),
    "a slice of another key": slices(WEIGHT, lambda parts: parts[0].update(key=f"{MOMENT}@0")),
    "a negative step": progress(step=-4),
    "a huge step": progress(step=10**30),
    "an absurd loss scale": progress(loss_scale=0.0),
    "a count below zero": progress(skipped=-1),
    "a text for a number": progress(elapsed_s="long"),
    "a changed number": progress(vouched=False, elapsed_s=77.5),
    "a changed plan": progress(vouched=False, plan="0" * 16),
    "a name that leaves the folder": outside,
    "a part that is a link out of the folder": linked,
    **{f"no {name}": drop(name) for name in FILES},
    **{f"half of {name}": halve(name) for name in FILES},
    "a file": become_file,
    "a link to nothing": become_link,
}
OF_STEPS = OF_WEIGHTS | {
    "a missing moment": retensor(lambda tensors: tensors.pop(f"{MOMENT}@0")),
    "a moment of another shape": retensor(
        lambda tensors: tensors.update({f"{MOMENT}@0": torch.zeros(33)})
    ),
    "a moment of another dtype": retensor(
        lambda tensors: tensors.update({f"{MOMENT}@0": torch.zeros(32).half()})
    ),
    "a moment that the manifest does not name": forget(MOMENT),
    "another step": progress(step=3),
}
#: By the name that the folder has then.
RENAMED = ("step-abc", "step-", "step--5", "step-00000010", "step-9", "step-٠٠٠٠٠٠٠٩")


@pytest.mark.parametrize("kind", OF_STEPS)
def test_a_damaged_newest_is_named_with_why_and_the_one_before_is_used(
    executor: Executor, run: RunFolder, kind: str
):
    newest = next(checkpoint_folder.newest_first(run.checkpoints))
    OF_STEPS[kind](newest)
    step, (said,) = find(executor, run.checkpoints)
    assert step == 3
    why = said.removeprefix(f"corrupt checkpoint {newest}: ").removesuffix(
        ". Going on from step 3: 1 step lost."
    )
    assert 10 < len(why) < len(said) - 60


@pytest.mark.parametrize("name", RENAMED)
def test_a_newest_of_another_name_is_named_and_the_one_before_is_used(
    executor: Executor, run: RunFolder, name: str
):
    newest = next(checkpoint_folder.newest_first(run.checkpoints))
    newest.rename(newest.with_name(name))
    step, (said,) = find(executor, run.checkpoints)
    assert (
        step == 3
        and f"{newest.with_name(name)}: its manifest is of step 4, its name is not" in said
    )


@pytest.mark.parametrize(
    "name", ["step-abc", "step-", "step--5", "step-00000010", "step-99999999999999999999999"]
)
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_entry_that_is_no_checkpoint_is_reported_and_skipped(
    executor: Executor, run: RunFolder, name: str, kind: str
):
    path = run.checkpoints / name
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    else:
        path.symlink_to("nowhere")
    step, (said,) = find(executor, run.checkpoints)
    assert step == 4 and f"{name}: it has no manifest.json" in said


def test_checkpoint_name_that_is_not_utf8_is_reported_printably(executor: Executor, run: RunFolder):
    (run.checkpoints / os.fsdecode(b"step-\xff")).mkdir()
    step, (said,) = find(executor, run.checkpoints)
    assert step == 4 and said.encode()


def any_damage(path: Path, rng: random.Random) -> str:
    """Damage of a kind and at a place that the generator chooses; what it was."""
    name = rng.choice(FILES)
    file = path / name
    content = bytearray(file.read_bytes())
    at = rng.choice([rng.randrange(len(content)), rng.randrange(min(200, len(content)))])
    kind = rng.choice(["flip", "truncate", "delete", "rename", "replace", "garbage", "swap"])
    if kind == "flip":
        content[at] ^= rng.randrange(1, 256)
        file.write_bytes(content)
    elif kind == "truncate":
        os.truncate(file, at)
    elif kind == "delete":
        file.unlink()
    elif kind == "rename":
        file.rename(path / f"{name}.bak")
    elif kind == "replace":
        tensors = load_file(path / PART)
        tensors[rng.choice(sorted(tensors))] = torch.randn(rng.randrange(1, 5), rng.randrange(1, 5))
        save_file(tensors, path / PART)
        if rng.random() < 0.5:
            vouch(path)
    elif kind == "garbage":
        (path / MANIFEST).write_bytes(rng.randbytes(rng.randrange(400)))
    else:
        other = rng.choice([other for other in FILES if other != name])
        shutil.copy(file, path / other)
    return f"{kind} {name} at {at}"


def test_damage_of_any_kind_is_found_or_changes_nothing(
    executor: Executor, run: RunFolder, tmp_path: Path
):
    rng = random.Random(27)
    passed_over = 0
    newest = next(checkpoint_folder.newest_first(run.checkpoints))
    shutil.copytree(newest, tmp_path / "kept")
    wanted = checkpoint_folder.verify(newest)
    for _ in range(150):
        what = any_damage(newest, rng)
        step, said = find(executor, run.checkpoints)
        if step == 4:  # As where a blank of the JSON became another one.
            assert not said and checkpoint_folder.verify(newest) == wanted, what
            if (
                PART in what
            ):  # What lies there twice, or beyond what the header names, is read by nobody.
                assert all(
                    map(
                        torch.equal,
                        *(
                            stored_tensors.tensors(at).values()
                            for at in (newest, tmp_path / "kept")
                        ),
                    )
                )
        else:
            assert step == 3 and len(said) == 1 and str(newest) in said[0], what
            passed_over += 1
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "kept", newest)
    assert passed_over > 120


def test_several_damaged_ones_are_all_named_and_none_whole_is_a_refusal(
    executor: Executor, run: RunFolder
):
    paths = list(checkpoint_folder.newest_first(run.checkpoints))
    OF_STEPS["a header that is refused"](paths[0])
    OF_STEPS["a byte above 0x7f in a key"](paths[1])
    step, (said,) = find(executor, run.checkpoints)
    assert step == 2 and all(str(path) in said for path in paths[:2]) and "2 steps lost" in said
    OF_STEPS["a missing moment"](paths[2])
    with pytest.raises(Refusal) as refusal:
        find(executor, run.checkpoints)
    assert refusal.value.problem.code == "checkpoint-corrupt"
    assert all(path.name in refusal.value.problem.fact for path in paths)


def test_a_whole_checkpoint_of_another_training_is_refused_not_passed_over(run: RunFolder):
    tensors = stored_tensors.tensors(stored_tensors.newest(run))
    del tensors[WEIGHT]  # Its tensors are that plan's, not this one's.
    other = TrainerState(step=4, plan="another", training="another", elapsed_s=1.0)
    stored_tensors.write(run.checkpoints, tensors, other)
    with pytest.raises(Refusal) as refusal:
        Start(run).train()
    assert refusal.value.problem.code == "plan-mismatch"


def test_a_resume_with_another_optimizer_names_it(run: RunFolder):
    """Its state is the other's: momentum of whole matrices is not that of elements."""
    before = run.load_plan()
    run.plans.mkdir()
    save(before, run.plans / f"{before.hash}.json")
    optimizer = replace(before.train.optimizer, muon=Muon())
    save(replace(before, train=replace(before.train, optimizer=optimizer)), run.plan)
    with pytest.raises(Refusal) as refusal:
        Start(run).train()
    assert (refusal.value.problem.code, "train.optimizer than" in refusal.value.problem.fact) == (
        "plan-mismatch",
        True,
    )


@pytest.mark.slow
def test_two_workers_fall_back_together(tmp_path: Path):
    plan = tiny.plan(
        replace(TRAIN, steps=40, checkpoint_every_s=0.001, validate_every=1000), rows=(1, 1)
    )
    run = tiny.run_folder(tmp_path / "run", plan)
    with tiny.workers(run) as workers:
        assert list(workers)[-1].reason == "done"
    newest, previous, *_ = checkpoint_folder.newest_first(run.checkpoints)
    assert {path.name for path in newest.glob("part-*")} == {
        "part-00000.safetensors",
        "part-00001.safetensors",
    }
    OF_STEPS["a moment that the manifest does not name"](newest)
    with tiny.workers(run) as workers:
        events = list(workers)
    (warned,) = (event.message for event in events if isinstance(event, Warned))
    assert str(newest) in warned
    assert [event.step for event in events if isinstance(event, Started)] == [
        checkpoint_folder.step_of(previous)
    ]
    assert events[-1].reason == "done" and events[-1].step == 40
    assert checkpoint_folder.verify(newest).step == 40


# -- the best weights
#   ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OF_WEIGHTS)
def test_damaged_best_weights_are_refused_with_what_helps(run: RunFolder, kind: str):
    OF_WEIGHTS[kind](run.best)
    with pytest.raises(Refusal) as refusal:
        inference.load(run)
    problem = refusal.value.problem
    assert problem.code == "checkpoint-corrupt" and str(run.best) in problem.fact
    subprocess.run(problem.remedy.partition(": ")[2], shell=True, check=True)
    assert inference.load(run).step == 4


# -- what is kept
#   ------------------------------------------------------------------------------------------------


def save_step(run: RunFolder, step: int, keep: int) -> list[int]:
    """Write a checkpoint of a step; the steps that are there then."""
    made = TrainerState(step=step, plan=run.load_plan().hash, training="t", elapsed_s=0)
    stored_tensors.write(run.checkpoints, stored_tensors.tensors(run.best), made, keep)
    return [
        checkpoint_folder.step_of(path) for path in checkpoint_folder.newest_first(run.checkpoints)
    ]


@pytest.mark.parametrize("name", FILES)
def test_remains_of_a_checkpoint_do_not_count_in_what_is_kept(run: RunFolder, name: str):
    (run.checkpoints / "step-00000004" / name).unlink()
    assert save_step(run, 5, keep=3) == [5, 3, 2]


def test_a_damaged_later_checkpoint_takes_no_place_of_one_that_is_written(
    executor: Executor, run: RunFolder
):
    os.truncate(run.checkpoints / "step-00000004" / PART, 100)
    shutil.rmtree(run.checkpoints / "step-00000003")
    assert find(executor, run.checkpoints)[0] == 2
    assert save_step(run, 3, keep=1) == [4, 3]
    assert save_step(run, 4, keep=1) == [4]
    assert checkpoint_folder.verify(run.checkpoints / "step-00000004").step == 4


@pytest.mark.parametrize("kind", ["a file", "a link to nothing"])
def test_damaged_entry_at_the_path_of_a_checkpoint_is_replaced(run: RunFolder, kind: str):
    OF_WEIGHTS[kind](run.checkpoints / "step-00000004")
    assert save_step(run, 4, keep=3) == [4, 3, 2]
    assert checkpoint_folder.verify(run.checkpoints / "step-00000004").step == 4
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


KILLED_WHILE_IT_DELETES = """
import os, signal, sys
from pathlib import Path
from farspan.domain.run import RunFolder
from tests.runtime.test_damage import save_step
removed = []
def watch(event, given):
    if event == "os.remove" and str(given[0]).endswith((".safetensors", ".json")):
        removed.append(given)
        if len(removed) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
save_step(RunFolder(Path(sys.argv[1])), 5, 3)
"""


def test_a_kill_half_way_through_a_deletion_leaves_nothing_that_looks_like_a_checkpoint(
    executor: Executor, run: RunFolder
):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_IT_DELETES, str(run.path)], timeout=120
    )
    assert done.returncode == -9
    assert [
        checkpoint_folder.step_of(path) for path in checkpoint_folder.newest_first(run.checkpoints)
    ] == [
        5,
        4,
        3,
    ]
    assert [path.name for path in run.checkpoints.glob(".*")] == [".step-00000002.tmp"]
    for path in checkpoint_folder.newest_first(run.checkpoints):
        shutil.rmtree(path)
    assert find(executor, run.checkpoints) == (None, [])
    assert not list(run.checkpoints.glob(".*"))
