"""Real worker processes: equality with a plain loop and across worker counts, resumption, signals,
damage."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from farspan.domain.model import ModelSpec
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import (
    Event,
    Finished,
    Rescheduled,
    Saved,
    Step,
    Validated,
    Warned,
    read_events,
)
from farspan.domain.train import Optimizer, Schedule, TrainSpec
from farspan.domain.units import counted
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import Corrupt, TrainerState
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.decoder import Decoder, initial_parameters, initialize_model
from farspan.runtime.parallel.executor import Outcome
from farspan.runtime.training.sample_order import PackedWindows, SampleOrder
from farspan.runtime.worker import as_problem, leave_group, write_problem_file
from farspan.semantics.identity import training_key
from farspan.semantics.lr_schedule import learning_rate
from tests import tiny
from tests.runtime import jobs, stored_tensors

NAN = math.nan
TRAIN = TrainSpec(
    steps=8,
    batch=6,
    seq_len=16,
    precision="fp32",
    optimizer=Optimizer(lr=3e-3),
    schedule=Schedule(warmup_steps=2),
    validate_every=4,
    seed=3,
)


def launch(run: RunFolder) -> list[Event]:
    with tiny.workers(run) as workers:
        return list(workers)


def steps_of(events: list[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return stored_tensors.weights(stored_tensors.newest(run))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[Event]]:
    """An uninterrupted run on one worker."""
    run = tiny.run_folder(tmp_path_factory.mktemp("whole") / "run", tiny.plan(TRAIN))
    return run, launch(run)


def plain_loop(folder: Path) -> tuple[list[float], float]:
    """The same training by the book, in float64: losses of every step and of the validation
    split."""
    model = Decoder(tiny.SPEC, attention="vanilla").double()
    initialize_model(model, TRAIN.seed)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    tokens = PackedWindows(np.fromfile(folder / "train.bin", "<u2"), TRAIN.seq_len)
    order = SampleOrder(tokens.count, TRAIN.seed)
    losses = []
    for step in range(TRAIN.steps):
        loss = _mean_loss(model, tokens, order.window(np.arange(step * 6, step * 6 + 6)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(TRAIN.schedule, TRAIN.optimizer.lr, step, TRAIN.steps)
        adamw.step()
        adamw.zero_grad()
        losses.append(float(loss.detach()))
    val = PackedWindows(np.fromfile(folder / "val.bin", "<u2"), TRAIN.seq_len)
    with torch.no_grad():
        return losses, float(_mean_loss(model, val, np.arange(val.count, dtype=np.uint64)))


def _mean_loss(model: Decoder, windows: PackedWindows, which: np.ndarray) -> torch.Tensor:
    inputs, targets = (torch.from_numpy(a) for a in windows.read(which))
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_single_worker_gives_the_losses_of_a_plain_float64_loop(whole):
    run, events = whole
    losses, val = plain_loop(run.path.parent / "corpus")
    assert [event.loss for event in steps_of(events)] == pytest.approx(losses, rel=1e-5)
    validations = [event for event in events if isinstance(event, Validated)]
    assert [event.step for event in validations] == [4, 8]
    assert validations[-1].loss == pytest.approx(val, rel=1e-5)
    assert validations[-1].tokens == 400


def test_an_uneven_split_over_workers_equals_one_worker(whole, tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(2, 1, 3), micro_rows=2))
    events = launch(run)
    one = steps_of(whole[1])
    assert [event.loss for event in steps_of(events)] == pytest.approx(
        [event.loss for event in one], rel=1e-5
    )
    assert [e.grad_norm for e in steps_of(events)] == pytest.approx(
        [event.grad_norm for event in one], rel=1e-4
    )
    mine = [e.loss for e in events if isinstance(e, Validated)]
    assert mine == pytest.approx([e.loss for e in whole[1] if isinstance(e, Validated)], rel=1e-5)


def interrupt_after(run: RunFolder, step: int, number: signal.Signals) -> list[Event]:
    """Start the run and signal its first worker once `step` is done."""
    seen: list[Event] = []
    with tiny.workers(run) as workers:
        for event in workers:
            seen.append(event)
            if isinstance(event, Step) and event.step == step:
                os.kill(workers.processes[0].pid, number)
    return seen


def recorded(events: list[Event]) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; a step that was made twice must have had the same."""
    found: dict[int, tuple[float, float]] = {}
    for event in steps_of(events):
        pair = (event.loss, event.grad_norm)
        assert found.setdefault(event.step, pair) == pair
    return found


def test_interrupted_and_killed_runs_resume_to_the_same_bits(tmp_path):
    # The schedule is of far more steps than are made, and every step is saved.
    train = replace(TRAIN, steps=10**6, validate_every=10**6, checkpoint_every_s=0.001)
    run = tiny.run_folder(tmp_path / "run", tiny.plan(train))
    done = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        events = interrupt_after(run, done + 20, number)
        assert isinstance(events[-1], Finished) and events[-1].reason == "interrupted"
        assert steps_of(events)[0].step == done + 1
        assert events[-1].step == steps_of(events)[-1].step >= done + 20
        done = events[-1].step

    with pytest.raises(Refusal) as refusal:
        interrupt_after(run, done + 20, signal.SIGKILL)
    assert refusal.value.problem.code == "worker-lost"
    assert "SIGKILL" in refusal.value.problem.fact
    saved = [event.step for event in read_events(run.events) if isinstance(event, Saved)]
    events = interrupt_after(run, done + 40, signal.SIGTERM)
    # A checkpoint may have been complete just before it was reported.
    assert steps_of(events)[0].step in (saved[-1] + 1, saved[-1] + 2)
    done = events[-1].step

    reference = tiny.run_folder(
        tmp_path / "reference", tiny.plan(replace(train, checkpoint_every_s=1e6))
    )
    uninterrupted = recorded(interrupt_after(reference, done, signal.SIGTERM))
    resumed = recorded(list(read_events(run.events)))
    assert list(resumed) == list(range(1, done + 1))
    assert resumed.items() <= uninterrupted.items()


def test_lost_worker_ends_the_others_and_is_named(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(replace(TRAIN, steps=10**6), rows=(3, 3)))
    killed = False
    with pytest.raises(Refusal) as refusal, tiny.workers(run) as workers:
        for event in workers:
            if isinstance(event, Step) and not killed:
                os.kill(workers.processes[1].pid, signal.SIGKILL)
                killed = True
    assert "rank 1" in refusal.value.problem.what
    assert "resume" in refusal.value.problem.remedy


def damage(path: Path, how: str) -> None:
    if how == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncate", "flip", "remove"])
@pytest.mark.parametrize("name", ["part-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path, how, name):
    folder = tmp_path / "checkpoints"
    for step in (3, 7):
        stored_tensors.write(
            folder,
            _tensors(),
            TrainerState(step=step, plan="p", training="t", elapsed_s=1.0),
            keep=2,
        )
    damage(folder / "step-00000007" / name, how)
    with pytest.raises(Corrupt):
        checkpoint_folder.verify(folder / "step-00000007")
    assert checkpoint_folder.verify(folder / "step-00000003").step == 3


def test_checkpoint_moved_aside_by_a_killed_replacement_is_restored(tmp_path):
    best = tmp_path / "best"
    progress = TrainerState(step=1, plan="p", training="t", elapsed_s=1.0)
    stored_tensors.write_one(best, _tensors(), progress)
    best.rename(tmp_path / ".best.old")
    checkpoint_folder.clean_up(tmp_path)
    assert checkpoint_folder.verify(best) == progress and [
        one.name for one in tmp_path.iterdir()
    ] == ["best"]
    (tmp_path / ".best.old").mkdir()
    checkpoint_folder.clean_up(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["best"]


def _tensors(spec: ModelSpec = tiny.SPEC) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors: first values, and moments of zero."""
    values = dict(initial_parameters(spec, 0))
    model = {f"model/{name}": value for name, value in values.items()}
    kinds = ("exp_avg", "exp_avg_sq")
    return model | {
        f"{kind}/{name}": torch.zeros_like(value)
        for kind in kinds
        for name, value in values.items()
    }


def test_resuming_past_a_damaged_checkpoint_reports_the_lost_steps(tmp_path):
    train = replace(TRAIN, steps=20, validate_every=1000, checkpoint_every_s=0.001)
    run = tiny.run_folder(tmp_path / "run", tiny.plan(train))
    launch(run)
    newest, previous = list(checkpoint_folder.newest_first(run.checkpoints))[:2]
    damage(newest / "part-00000.safetensors", "flip")
    events = launch(run)
    warning = next(event for event in events if isinstance(event, Warned))
    lost = 20 - int(previous.name.removeprefix("step-"))
    assert str(newest) in warning.message
    assert f": {counted(lost, 'step')} lost" in warning.message
    assert steps_of(events)[-1].step == 20


def test_when_every_checkpoint_is_damaged_the_run_refuses(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(replace(TRAIN, steps=2)))
    launch(run)
    for path in checkpoint_folder.newest_first(run.checkpoints):
        damage(path / "part-00000.safetensors", "truncate")
    with pytest.raises(Refusal) as refusal:
        launch(run)
    assert refusal.value.problem.code == "checkpoint-corrupt"


def test_only_the_last_k_checkpoints_and_the_best_are_kept(tmp_path):
    train = replace(TRAIN, steps=20, keep=2, checkpoint_every_s=0.001)
    run = tiny.run_folder(tmp_path / "run", tiny.plan(train))
    events = launch(run)
    assert len([event for event in events if isinstance(event, Saved)]) > 2
    assert len(list(checkpoint_folder.newest_first(run.checkpoints))) == 2
    best = min(
        (event for event in events if isinstance(event, Validated)), key=lambda event: event.loss
    )
    assert checkpoint_folder.verify(run.best).step == best.step


@pytest.mark.parametrize("rows", [(6,), (3, 3)])
def test_a_non_finite_loss_stops_before_the_update(tmp_path, rows):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=rows))
    poison(run)
    with pytest.raises(Refusal) as refusal:
        launch(run)
    problem = refusal.value.problem
    assert problem.code == "non-finite" and problem.exit_code == 20
    assert "rank" in problem.where and "samples" in problem.where
    assert problem.what.endswith("at step 2; the update was not made")
    assert not [event for event in read_events(run.events) if isinstance(event, Step)]
    assert all(
        torch.isfinite(tensor).all()
        for name, tensor in weights(run).items()
        if name != "tok.weight"
    )


def poison(run: RunFolder) -> None:
    """A checkpoint after step 1 some of whose embeddings are infinite, so that the next loss is not
    a number."""
    tensors = _tensors()
    tensors["model/tok.weight"][:3] = float("inf")
    plan = run.load_plan()
    progress = TrainerState(step=1, plan=plan.hash, training=training_key(plan), elapsed_s=0.0)
    stored_tensors.write(run.checkpoints, tensors, progress)


def test_the_message_names_the_rank_whose_own_loss_is_not_finite(tmp_path):
    plan = tiny.plan(TRAIN, rows=(3, 3), spec=replace(tiny.SPEC, tied=False))
    run = tiny.run_folder(tmp_path / "run", plan)
    windows = PackedWindows(np.fromfile(tmp_path / "corpus" / "train.bin", "<u2"), TRAIN.seq_len)
    order = SampleOrder(windows.count, TRAIN.seed)
    first, second = (
        windows.read(order.window(np.concatenate(Topology(plan, rank).samples_by_microbatch(1))))[0]
        for rank in (0, 1)
    )
    tensors = _tensors(plan.model)
    tensors["model/tok.weight"][np.setdiff1d(second, first)] = float("nan")
    progress = TrainerState(step=1, plan=plan.hash, training=training_key(plan), elapsed_s=0.0)
    stored_tensors.write(run.checkpoints, tensors, progress)
    with pytest.raises(Refusal) as refusal:
        launch(run)
    assert refusal.value.problem.where == "rank 1, among samples 6 to 11"
    assert refusal.value.problem.fact.endswith("the newest checkpoint is of step 1")


@pytest.mark.parametrize(
    ("by_rank", "faulty"),
    [
        ({0: (1.0, NAN), 1: (NAN, NAN)}, [1]),
        ({0: (1.0, NAN), 1: (2.0, NAN)}, [0, 1]),
        ({0: (1.0, 3.0), 1: (0.0, math.inf), 2: (1.0, 4.0)}, [1]),
    ],
)
def test_non_finite_shared_gradient_blames_ranks_by_their_own_loss_first(by_rank, faulty):
    assert Outcome(sum(loss for loss, _ in by_rank.values()), NAN, by_rank).faulty == faulty


def test_a_first_validation_that_is_not_finite_ends_the_run(tmp_path):
    plan = tiny.plan(TRAIN, spec=replace(tiny.SPEC, tied=False))
    run = tiny.run_folder(tmp_path / "run", plan)
    tokens = np.fromfile(tmp_path / "corpus" / "val.bin", "<u2")
    tokens[5] = 299
    tokens.tofile(tmp_path / "corpus" / "val.bin")
    train = np.fromfile(tmp_path / "corpus" / "train.bin", "<u2")
    train[train == 299] = 298
    train.tofile(tmp_path / "corpus" / "train.bin")
    tensors = _tensors(plan.model)
    tensors["model/tok.weight"][299] = float("nan")
    progress = TrainerState(step=1, plan=plan.hash, training=training_key(plan), elapsed_s=0.0)
    stored_tensors.write(run.checkpoints, tensors, progress)
    with pytest.raises(Refusal, match="validation loss is not finite") as refusal:
        launch(run)
    assert refusal.value.problem.code == "non-finite"
    assert list(read_events(run.events))[-1].reason == "failed"


def test_a_checkpoint_in_a_folder_with_a_colon_that_is_damaged_is_passed_over(tmp_path):
    run = tiny.run_folder(
        tmp_path / "12:30" / "run", tiny.plan(replace(TRAIN, checkpoint_every_s=0.001))
    )
    launch(run)
    newest = next(checkpoint_folder.newest_first(run.checkpoints))
    damage(newest / "part-00000.safetensors", "truncate")
    events = launch(run)
    warning = next(event for event in events if isinstance(event, Warned))
    assert " lost" in warning.message and events[-1].reason == "done"


def test_patience_stops_early(tmp_path):
    train = replace(TRAIN, steps=500, validate_every=2, patience=3, optimizer=Optimizer(lr=0.5))
    run = tiny.run_folder(tmp_path / "run", tiny.plan(train))
    events = launch(run)
    validations = [event for event in events if isinstance(event, Validated)]
    assert events[-1].reason == "early-stop"
    assert [event.best for event in validations[-3:]] == [False] * 3


def test_a_deadline_ends_the_run_with_a_checkpoint(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(replace(TRAIN, steps=10**6, deadline_s=1.0)))
    events = launch(run)
    assert events[-1].reason == "deadline"
    assert next(e for e in reversed(events) if isinstance(e, Saved)).step == events[-1].step


@pytest.mark.parametrize(
    ("rows", "planned", "most"),
    [((6,), 10**5, None), ((3, 3), 10**5, None), ((3, 3), 40, 10**5)],
)
def test_run_ends_within_its_time_budget(fleet, tmp_path, rows, planned, most):
    """By a clock that only the work moves: steps, validations and saves. A run that was planned too
    short, or too long, makes as many steps as its time allows.

    Workers learn of a decision a step after rank 0 made it, which must not report it twice.
    """
    tiny.corpus(tmp_path / "corpus", val=200_001)
    train = replace(
        TRAIN,
        steps=planned,
        most_steps=most or msgspec.UNSET,
        validate_every=100,
        validate_tokens=4096,
        deadline_s=12.0,
        checkpoint_every_s=3.0,
    )
    plan = tiny.plan(train, rows=rows)
    run = tiny.run_folder(tmp_path / "run", plan)
    clock = jobs.WorkClock(step_s=0.04, token_s=1e-5)
    finished, *_ = fleet.run(jobs.train_by_clock, len(rows), plan, run.path, clock)
    assert finished.reason == "deadline"
    assert 0.9 * 12 <= finished.elapsed_s <= 12
    steps = steps_of(finished.events)
    validations = [event for event in finished.events if isinstance(event, Validated)]
    assert len(steps) > 150
    assert validations[-1].step == steps[-1].step
    assert validations[-1].tokens > 4096 and validations[-1].sample_tokens == 4096
    rates = [event.lr for event in steps]
    top = rates.index(max(rates))
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.1 * max(rates), rel=0.05)
    (change,) = [event for event in finished.events if isinstance(event, Rescheduled)]
    assert change.planned == planned and change.steps == pytest.approx(len(steps), rel=0.3)
    assert not [event for event in finished.events if isinstance(event, Warned)]
    # One each three seconds, one with the warning, and the last.
    assert len([event for event in finished.events if isinstance(event, Saved)]) <= 4 + 1 + 1


def test_another_corpus_than_planned_is_refused(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    text = run.corpus.read_text().replace("7e57" * 4, "0" * 16)
    run.corpus.write_text(text)
    with pytest.raises(Refusal) as refusal:
        launch(run)
    assert refusal.value.problem.code == "plan-mismatch"


def test_two_interrupts_end_the_workers_at_once(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(replace(TRAIN, steps=10**6)))
    with tiny.workers(run) as workers:
        for event in workers:
            if isinstance(event, Step):
                os.kill(
                    workers.processes[0].pid, signal.SIGSTOP
                )  # It would end by the first interrupt.
                workers.interrupt()
                break
        threading.Timer(0.0, workers.interrupt).start()
        with pytest.raises(Refusal):
            list(workers)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), "out-of-memory"),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
            ),
            "out-of-memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "out-of-memory",
        ),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), "out-of-memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "worker-lost"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk-full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk-full"),
        (Corrupt("model.safetensors does not match its checksum"), "checkpoint-corrupt"),
        (RuntimeError("PytorchStreamWriter failed: No space left on device"), "disk-full"),
        (RuntimeError("Error creating /dev/shm/nccl-AbC: No space left on device"), "worker-lost"),
    ],
)
def test_worker_errors_become_problems_with_the_right_code_and_a_file(tmp_path, error, code):
    run = RunFolder(tmp_path / "run")
    told = as_problem(error, tiny.plan(TRAIN), run, 0)
    assert told.code == code
    write_problem_file(told, run, 3)
    assert not run.path.exists(), "a run's folder that was deleted is not made again"
    leave_group(run, 3)  # As each worker begins: on another host the folder may not be there yet.
    write_problem_file(told, run, 3)
    assert (run.logs / "rank-3.problem.json").exists()
