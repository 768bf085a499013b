"""Damaged checkpoints: whatever is wrong with the newest, the run goes on from the one before, and says why."""

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
from farspan.domain.results import Started, Warned
from farspan.domain.run import RunFolder
from farspan.runtime import inference
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.checkpoint import MODEL, OPTIMIZER
from farspan.runtime.checkpoint.checkpointer import Checkpointer
from farspan.runtime.comm.collective import Group
from farspan.runtime.comm.topology import Topology
from farspan.runtime.parallel.executor import Executor
from tests import tiny
from tests.runtime.test_trainer import TRAIN, Start

STATE = "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that wrote a checkpoint at every step, of which steps 2 to 4 are kept, and the best weights."""
    plan = tiny.plan(replace(TRAIN, steps=4, checkpoint_every_s=0.5, validate_every=2))
    start = Start(tiny.run_folder(tmp_path_factory.mktemp("whole") / "run", plan))
    assert start.train()[0] == "done"
    assert [checkpoint.step_of(path) for path in checkpoint.newest_first(start.run.checkpoints)] == [4, 3, 2]
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
    adopted, said = list[checkpoint.TrainingProgress](), list[str]()
    path = Checkpointer(executor, folder, 3).find(adopted.append, said.append)
    return (adopted[0].step if path else None), said


# -- kinds of damage ---------------------------------------------------------------------------------------------------


def set_state(path: Path, change: Callable[[dict], None]) -> None:
    state = json.loads((path / STATE).read_bytes())
    change(state)
    (path / STATE).write_text(json.dumps(state))


def vouch(path: Path, name: str) -> None:
    """Let the state name the checksum that a file has now."""
    set_state(path, lambda state: state["sha256"].update({name: checkpoint._sha256(path / name)}))


def retensor(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the tensors of a file whose checksum matches all the same."""

    def damage(path: Path) -> None:
        tensors = load_file(path / name)
        change(tensors)
        save_file(tensors, path / name)
        vouch(path, name)

    return damage


def overwrite(name: str, content: bytes, *, vouched: bool = False) -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_bytes(content)
        if vouched:
            vouch(path, name)

    return damage


def progress(**values: object) -> Damage:
    return lambda path: set_state(path, lambda state: state["progress"].update(values))


def progress_unhashed(**values: object) -> Damage:
    """As in a checkpoint from before its progress had a checksum."""

    def damage(path: Path) -> None:
        progress(**values)(path)
        set_state(path, lambda state: state.pop("progress_hash"))

    return damage


def high_byte(where: bytes) -> Damage:
    def damage(path: Path) -> None:
        content = (path / STATE).read_bytes()
        assert where in content
        (path / STATE).write_bytes(content.replace(where, where[:-1] + b"\xff", 1))

    return damage


def pipe(path: Path) -> None:
    (path / STATE).unlink()
    os.mkfifo(path / STATE)


def outside(path: Path) -> None:
    shutil.copy(path / MODEL, path.parent / MODEL)
    set_state(path, lambda state: state["sha256"].update({f"../{MODEL}": state["sha256"].pop(MODEL)}))
    (path / MODEL).unlink()


def forget(path: Path) -> None:
    set_state(path, lambda state: state["sha256"].pop(OPTIMIZER))


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


KEY = "exp_avg.blocks.0.attn.out.bias"
#: Of what the best weights have too.
OF_WEIGHTS: dict[str, Damage] = {
    "a byte above 0x7f in a value": high_byte(b'"plan": "'),
    "a byte above 0x7f in a key": high_byte(b'"pro'),
    "a byte above 0x7f at first": overwrite(STATE, b"\xff{}"),
    "an empty state": overwrite(STATE, b""),
    "a state of another shape": overwrite(STATE, b'{"progress": 1}'),
    "a state of brackets": overwrite(STATE, b"[" * 100_000),
    "a state that is a pipe": pipe,
    "an empty file, vouched for": overwrite(MODEL, b"", vouched=True),
    "a header that is refused": overwrite(MODEL, b"\xff" * 64, vouched=True),
    "a header beyond the file": overwrite(MODEL, (2**20).to_bytes(8, "little") + b"{}", vouched=True),
    "a missing weight": retensor(MODEL, lambda tensors: tensors.pop("tok.weight")),
    "a tensor too many": retensor(MODEL, lambda tensors: tensors.update(more=torch.zeros(1))),
    "a weight of another shape": retensor(MODEL, lambda tensors: tensors.update({"tok.weight": torch.zeros(33)})),
    "a negative step": progress(step=-4),
    "a negative step, not hashed": progress_unhashed(step=-4),
    "a huge step": progress_unhashed(step=10**30),
    "an absurd loss scale": progress_unhashed(loss_scale=0.0),
    "a count below zero": progress_unhashed(skipped=-1),
    "a text for a number": progress_unhashed(elapsed_s="long"),
    "a changed number": progress(elapsed_s=77.5),
    "a changed plan": progress(plan="0" * 16),
    "a name that leaves the folder": outside,
    **{f"no {name}": drop(name) for name in (MODEL, STATE)},
    **{f"half of {name}": halve(name) for name in (MODEL, STATE)},
    "a file": become_file,
    "a link to nothing": become_link,
}
OF_STEPS = OF_WEIGHTS | {
    "a missing moment": retensor(OPTIMIZER, lambda tensors: tensors.pop(KEY)),
    "a moment of another shape": retensor(OPTIMIZER, lambda tensors: tensors.update({KEY: torch.zeros(33)})),
    "a moment of another dtype": retensor(OPTIMIZER, lambda tensors: tensors.update({KEY: tensors[KEY].half()})),
    "no moments": drop(OPTIMIZER),
    "half of the moments": halve(OPTIMIZER),
    "moments that the state does not name": forget,
    "another step": progress(step=3),
    "another step, not hashed": progress_unhashed(step=3),
}
#: By the name that the folder has then.
RENAMED = ("step-abc", "step-", "step--5", "step-00000010", "step-9", "step-٠٠٠٠٠٠٠٩")


@pytest.mark.parametrize("kind", OF_STEPS)
def test_a_damaged_newest_is_named_with_why_and_the_one_before_is_used(executor: Executor, run: RunFolder, kind: str):
    newest = next(checkpoint.newest_first(run.checkpoints))
    OF_STEPS[kind](newest)
    step, (said,) = find(executor, run.checkpoints)
    assert step == 3
    why = said.removeprefix(f"corrupt checkpoint {newest}: ").removesuffix(". Going on from step 3: 1 step lost.")
    assert 10 < len(why) < len(said) - 60


@pytest.mark.parametrize("name", RENAMED)
def test_a_newest_of_another_name_is_named_and_the_one_before_is_used(executor: Executor, run: RunFolder, name: str):
    newest = next(checkpoint.newest_first(run.checkpoints))
    newest.rename(newest.with_name(name))
    step, (said,) = find(executor, run.checkpoints)
    assert step == 3 and f"{newest.with_name(name)}: its {STATE} is of step 4, its name is not" in said


@pytest.mark.parametrize("name", ["step-abc", "step-", "step--5", "step-00000010", "step-99999999999999999999999"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_checkpoint_beside_whole_ones_stops_nothing(
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
    assert step == 4 and f"{name}: it has no state.json" in said


def test_a_name_that_is_not_text_can_be_said(executor: Executor, run: RunFolder):
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
        tensors = load_file(path / MODEL)
        tensors[rng.choice(sorted(tensors))] = torch.randn(rng.randrange(1, 5), rng.randrange(1, 5))
        save_file(tensors, path / MODEL)
        if rng.random() < 0.5:
            vouch(path, MODEL)
    elif kind == "garbage":
        (path / STATE).write_bytes(rng.randbytes(rng.randrange(400)))
    else:
        other = rng.choice([other for other in FILES if other != name])
        shutil.copy(file, path / other)
    return f"{kind} {name} at {at}"


def test_damage_of_any_kind_is_found_or_changes_nothing(executor: Executor, run: RunFolder, tmp_path: Path):
    rng, passed_over = random.Random(27), 0
    newest = next(checkpoint.newest_first(run.checkpoints))
    shutil.copytree(newest, tmp_path / "kept")
    wanted = checkpoint.verify(newest)
    for _ in range(150):
        what = any_damage(newest, rng)
        step, said = find(executor, run.checkpoints)
        if step == 4:  # As where a blank of the JSON became another one.
            assert not said and checkpoint.verify(newest) == wanted and STATE in what, what
            assert all((newest / name).read_bytes() == (tmp_path / "kept" / name).read_bytes() for name in FILES[:2])
        else:
            assert step == 3 and len(said) == 1 and str(newest) in said[0], what
            passed_over += 1
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "kept", newest)
    assert passed_over > 120


def test_several_damaged_ones_are_all_named_and_none_whole_is_a_refusal(executor: Executor, run: RunFolder):
    paths = list(checkpoint.newest_first(run.checkpoints))
    OF_STEPS["a header that is refused"](paths[0])
    OF_STEPS["a byte above 0x7f in a key"](paths[1])
    step, (said,) = find(executor, run.checkpoints)
    assert step == 2 and all(str(path) in said for path in paths[:2]) and "2 steps lost" in said
    OF_STEPS["a missing moment"](paths[2])
    with pytest.raises(Refusal) as refusal:
        find(executor, run.checkpoints)
    assert refusal.value.problem.code == "checkpoint-corrupt"
    assert all(path.name in refusal.value.problem.fact for path in paths)


def test_a_whole_checkpoint_of_another_plan_is_refused_not_passed_over(run: RunFolder):
    files = {name: load_file(next(checkpoint.newest_first(run.checkpoints)) / name) for name in (MODEL, OPTIMIZER)}
    del files[MODEL]["tok.weight"]  # Its tensors are that plan's, not this one's.
    other = checkpoint.TrainingProgress(step=4, plan="another", elapsed_s=1.0)
    checkpoint.write(run.checkpoints, tiny.collected(files), other, keep=3)
    with pytest.raises(Refusal) as refusal:
        Start(run).train()
    assert refusal.value.problem.code == "plan-mismatch"


def test_two_workers_fall_back_together(tmp_path: Path):
    plan = tiny.plan(replace(TRAIN, steps=40, checkpoint_every_s=0.001, validate_every=1000), rows=(1, 1))
    run = tiny.run_folder(tmp_path / "run", plan)
    with tiny.workers(run) as workers:
        assert list(workers)[-1].reason == "done"
    newest, previous, *_ = checkpoint.newest_first(run.checkpoints)
    OF_STEPS["a missing moment"](newest)
    with tiny.workers(run) as workers:
        events = list(workers)
    (warned,) = (event.message for event in events if isinstance(event, Warned))
    assert str(newest) in warned
    assert [event.step for event in events if isinstance(event, Started)] == [checkpoint.step_of(previous)]
    assert events[-1].reason == "done" and events[-1].step == 40
    assert checkpoint.verify(newest).step == 40


# -- the best weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OF_WEIGHTS)
def test_damaged_best_weights_are_refused_with_what_helps(run: RunFolder, kind: str):
    OF_WEIGHTS[kind](run.best)
    with pytest.raises(Refusal) as refusal:
        inference.load(run)
    problem = refusal.value.problem
    assert problem.code == "checkpoint-corrupt" and str(run.best) in problem.fact
    subprocess.run(problem.remedy.partition(": ")[2], shell=True, check=True)
    assert inference.load(run).step == 4


# -- what is kept ------------------------------------------------------------------------------------------------------


def save_step(run: RunFolder, step: int, keep: int) -> list[int]:
    """Write a checkpoint of a step; the steps that are there then."""
    files = {name: load_file(run.best / MODEL) for name in (MODEL, OPTIMIZER)}
    plan = run.load_plan().hash
    checkpoint.write(
        run.checkpoints, tiny.collected(files), checkpoint.TrainingProgress(step=step, plan=plan, elapsed_s=0), keep
    )
    return [checkpoint.step_of(path) for path in checkpoint.newest_first(run.checkpoints)]


@pytest.mark.parametrize("name", FILES)
def test_remains_of_a_checkpoint_do_not_count_in_what_is_kept(run: RunFolder, name: str):
    (run.checkpoints / "step-00000004" / name).unlink()
    assert save_step(run, 5, keep=3) == [5, 3, 2]


def test_a_damaged_later_checkpoint_takes_no_place_of_one_that_is_written(executor: Executor, run: RunFolder):
    os.truncate(run.checkpoints / "step-00000004" / MODEL, 100)
    shutil.rmtree(run.checkpoints / "step-00000003")
    assert find(executor, run.checkpoints)[0] == 2
    assert save_step(run, 3, keep=1) == [4, 3]
    assert save_step(run, 4, keep=1) == [4]
    assert checkpoint.verify(run.checkpoints / "step-00000004").step == 4


@pytest.mark.parametrize("kind", ["a file", "a link to nothing"])
def test_what_stands_where_a_checkpoint_belongs_is_replaced(run: RunFolder, kind: str):
    OF_WEIGHTS[kind](run.checkpoints / "step-00000004")
    assert save_step(run, 4, keep=3) == [4, 3, 2]
    assert checkpoint.verify(run.checkpoints / "step-00000004").step == 4
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


KILLED_WHILE_IT_DELETES = """
import os, signal, sys
from pathlib import Path
from farspan.domain.run import RunFolder
from tests.runtime.test_damage import save_step
removed = []
def watch(event, given):
    if event == "os.remove" and str(given[0]).endswith(".safetensors"):
        removed.append(given)
        if len(removed) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
save_step(RunFolder(Path(sys.argv[1])), 5, 3)
"""


def test_a_kill_half_way_through_a_deletion_leaves_nothing_that_looks_like_a_checkpoint(
    executor: Executor, run: RunFolder
):
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_DELETES, str(run.path)], timeout=120)
    assert done.returncode == -9
    assert [checkpoint.step_of(path) for path in checkpoint.newest_first(run.checkpoints)] == [5, 4, 3]
    assert [path.name for path in run.checkpoints.glob(".*")] == [".step-00000002.tmp"]
    for path in checkpoint.newest_first(run.checkpoints):
        shutil.rmtree(path)
    assert find(executor, run.checkpoints) == (None, [])
    assert not list(run.checkpoints.glob(".*"))
