"""The training loop of one worker: batches in plan order, gradients summed over the data axis, one update a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan, Stage
from farspan.domain.problems import Refusal
from farspan.domain.results import Event, Saved, Step, Validated, Warned
from farspan.domain.run import RunFolder
from farspan.runtime import checkpoint
from farspan.runtime.budget import TimeBudget
from farspan.runtime.checkpoint import Progress
from farspan.runtime.collective import Group
from farspan.runtime.data import Order, Windows, samples_of
from farspan.runtime.device import peak_memory
from farspan.runtime.model import Decoder
from farspan.runtime.reducer import Reducer
from farspan.runtime.state import TrainState, learning_rate

#: Loss scaling for fp16 as in arXiv 1710.03740, section 4.2: start high, halve on overflow, double after a quiet while.
FIRST_LOSS_SCALE = 2.0**16
QUIET_STEPS = 2000


@dataclass
class Worker:
    """What one worker holds for the length of a run."""

    plan: Plan
    run: RunFolder
    group: Group
    model: Decoder
    state: TrainState
    manifest: CorpusManifest
    train: Windows
    val: Windows
    emit: Callable[[Event], None]
    clock: Callable[[], float]
    #: Asked between steps: whether to save and end.
    stop: Callable[[], bool] = lambda: False

    @property
    def stage(self) -> Stage:
        return self.plan.replicas[0].stages[0]

    @property
    def micro_rows(self) -> int:
        """Sequences that this worker reads at a time."""
        return self.plan.replicas[0].micro_rows(0, self.group.rank)


class Trainer:
    """Runs the steps of a plan from where its newest whole checkpoint left off."""

    def __init__(self, worker: Worker, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.w, self.monotonic = worker, monotonic
        self.order = Order(worker.train.count, worker.plan.train.seed)
        bucket = worker.stage.grad_sync.bucket_bytes or worker.state.grad.nbytes
        self.reducer = Reducer(worker.state, bucket) if worker.group.world > 1 else None
        self.progress = Progress(step=0, plan=worker.plan.hash, elapsed_s=0.0)
        deadline_s, planned = worker.plan.train.deadline_s, worker.plan.train.steps
        self.budget = TimeBudget(deadline_s, planned) if deadline_s is not None else None
        #: Updates made so far, by this start and those before it, and updates in all.
        self.step, self.steps = 0, planned
        self.loss_scale = FIRST_LOSS_SCALE if worker.plan.train.precision == "fp16" else 1.0
        self.quiet = 0
        self._started = self._saved_at = monotonic()
        self._saved_step = self._validated_step = -1

    @property
    def elapsed_s(self) -> float:
        return self.progress.elapsed_s + self.monotonic() - self._started

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train to the end, the deadline, an early stop or a signal; returns which. The last state is saved."""
        train, reason = self.w.plan.train, self._ended()
        while not reason:
            began, steps = time.perf_counter(), self.steps
            loss, norm, tokens, lr = self._step(self.step)
            self.step += 1
            self.w.emit(Step(
                at=self.w.clock(), step=self.step, loss=loss, lr=lr, grad_norm=norm, tokens=tokens,
                step_s=time.perf_counter() - began, memory_bytes=peak_memory(self.w.group.device),
            ))  # fmt: skip
            if self.step % train.validate_every == 0 or self.step == self.steps:
                self._validate()
            reason = self._reason_to_stop()
            if reason == "deadline" and self._validated_step != self.step:
                self._validate()
            # A new number of steps changes all that follows: saved at once, no resumption can miss it.
            if not reason and (self.steps != steps or self.monotonic() - self._saved_at >= train.checkpoint_every_s):
                self.save()
        self.save()
        return reason

    def _ended(self) -> str:
        if self.step >= self.w.plan.train.steps:
            return "done"
        return "deadline" if self.step >= self.steps else ""

    def _reason_to_stop(self) -> str:
        """Agreed by all workers: a signal anywhere stops all; rank 0's clock and validations decide the rest."""
        steps, stale, patience = 0, False, self.w.plan.train.patience
        if self.w.group.rank == 0:
            steps = self.budget.steps(self.step, self.elapsed_s, self.steps) if self.budget else self.steps
            stale = 0 < patience <= self.progress.stale
        interrupted, any_stale, all_steps = self.w.group.sum(self.w.stop(), stale, steps)
        self._replan(int(all_steps))
        return "interrupted" if interrupted else self._ended() or ("early-stop" if any_stale else "")

    def _replan(self, steps: int) -> None:
        if self.step < steps != self.steps and self.w.group.rank == 0:
            message = f"at the pace so far {steps} steps fit the time budget, not {self.steps}"
            self.w.emit(Warned(at=self.w.clock(), message=f"{message}; the learning rate follows"))
        self.steps = steps

    def _step(self, step: int) -> tuple[float, float, int, float]:
        """One update. Returns the mean loss, the gradient norm before clipping, valid tokens, and the learning rate."""
        train, stage, group, micro_rows = self.w.plan.train, self.w.stage, self.w.group, self.w.micro_rows
        batch = self.order.window(np.arange(step * train.batch, (step + 1) * train.batch, dtype=np.int64))
        valid_tokens = int(self.w.train.valid(batch).sum())
        mine = self.order.window(samples_of(step, stage.rows, group.rank))
        total = torch.zeros((), device=group.device)
        starts = list(range(0, len(mine), micro_rows))
        for start in starts:
            if self.reducer and start == starts[-1]:
                self.reducer.arm()
            inputs, targets = self._to_device(self.w.train.read(mine[start : start + micro_rows]))
            loss = self.w.model.loss(inputs, targets)
            (loss * (self.loss_scale / valid_tokens)).backward()
            total += loss.detach()
        if self.reducer:
            self.reducer.finish()
        norm = self.w.state.grad_norm() / self.loss_scale
        local = float(total) / valid_tokens
        loss_mean = group.sum(local)[0]
        lr = learning_rate(train.schedule, train.optimizer.lr, step, self.steps)
        if self._finite(step, local, loss_mean, norm):
            clip = train.optimizer.clip
            excess = max(1.0, norm / clip) if clip else 1.0
            self.w.state.update(train.optimizer, lr, step + 1, self.loss_scale * excess)
        return loss_mean, norm, valid_tokens, lr

    def _to_device(self, arrays: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.w.group.device
        inputs, targets = (torch.from_numpy(a).to(device, non_blocking=True) for a in arrays)
        return inputs, targets

    # -- what can go wrong -----------------------------------------------------------------------------------------

    def _finite(self, step: int, local: float, loss: float, norm: float) -> bool:
        """True to update. An fp16 overflow skips the update and halves the scale; anything else refuses to go on."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.quiet += 1
            if self.loss_scale > 1.0 and self.quiet % QUIET_STEPS == 0:
                self.loss_scale *= 2
            return True
        if math.isfinite(loss) and self.loss_scale > 1.0:
            self.loss_scale /= 2
            self.quiet = 0
            self.w.state.grad.zero_()
            return False
        self.w.state.grad.zero_()
        self.save()
        bad = [rank for rank, value in enumerate(self.w.group.gather(local)) if not math.isfinite(value)]
        samples = [samples_of(step, self.w.stage.rows, rank) for rank in bad or range(self.w.group.world)]
        what = "loss" if bad else "gradient"
        raise Refusal(
            "non-finite",
            what=f"the {what} is not finite at step {step + 1}; the update was not made",
            where=f"rank {', '.join(map(str, bad)) or 'any'}, samples {samples[0][0]} to {samples[-1][-1]}",
            fact=f"loss {loss}, gradient norm {norm}, learning rate so far up to {self.w.plan.train.optimizer.lr:g}; "
            f"the state before the update is saved as step {step}",
            remedy="lower train.optimizer.lr in run.yaml, then: farspan train run.yaml --run FOLDER",
        )

    # -- validation and checkpoints --------------------------------------------------------------------------------

    def _validate(self) -> None:
        loss, tokens, seconds = self.validation_loss()
        self._validated_step = self.step
        best = self.progress.best_loss is None or loss < self.progress.best_loss
        self.progress = replace(
            self.progress,
            best_loss=loss if best else self.progress.best_loss,
            stale=0 if best else self.progress.stale + 1,
        )
        val = self.w.manifest.val
        bits = loss / math.log(2) * val.tokens / val.text_bytes
        self.w.emit(Validated(
            at=self.w.clock(), step=self.step, loss=loss, bits_per_byte=bits, tokens=tokens, seconds=seconds, best=best
        ))  # fmt: skip
        if best and self.w.group.rank == 0:
            with self.w.group.writing:
                checkpoint.write_best(self.w.run.best, self.w.state, self._current())

    @torch.no_grad()
    def validation_loss(self) -> tuple[float, int, float]:
        """Mean loss over (the first `validate_tokens` of) the validation split, tokens read, seconds."""
        train, group, val, began = self.w.plan.train, self.w.group, self.w.val, time.perf_counter()
        limit = val.count if not train.validate_tokens else min(val.count, -(-train.validate_tokens // train.seq_len))
        total, tokens = 0.0, 0
        self.w.model.eval()
        # The same for every worker, whose rows a step may differ: together they read each window once.
        micro = min(self.w.plan.replicas[0].micro_rows(0, c) for c in range(len(self.w.stage.rows)))
        for start in range(group.rank * micro, limit, group.world * micro):
            windows = np.arange(start, min(start + micro, limit), dtype=np.uint64)
            inputs, targets = self._to_device(val.read(windows))
            total += float(self.w.model.loss(inputs, targets))
            tokens += int(val.valid(windows).sum())
        self.w.model.train()
        total, counted = group.sum(total, tokens)
        return total / max(1.0, counted), int(counted), time.perf_counter() - began

    def _current(self) -> Progress:
        return replace(
            self.progress, step=self.step, steps=self.steps, elapsed_s=self.elapsed_s, loss_scale=self.loss_scale,
            quiet=self.quiet,
        )  # fmt: skip

    def save(self) -> None:
        """Write a checkpoint of the state as it is, unless that was the last one written."""
        self._saved_at = self.monotonic()
        if self.step == self._saved_step or self.w.group.rank != 0:
            return
        began = time.perf_counter()
        with self.w.group.writing:
            path, size = checkpoint.write(self.w.run.checkpoints, self.w.state, self._current(), self.w.plan.train.keep)
        self._saved_step = self.step
        self.w.emit(Saved(
            at=self.w.clock(), step=self.step, path=str(path), size_bytes=size, seconds=time.perf_counter() - began
        ))  # fmt: skip

    def restore(self) -> None:
        """Go on from the newest whole checkpoint, if any. Rank 0 reads it; the others get its state from rank 0."""
        if self.w.group.rank == 0:
            self._read_newest()
        progress = msgspec.json.decode(self.w.group.share(msgspec.json.encode(self._current())), type=Progress)
        if self.w.group.rank != 0:
            self._adopt(progress)
        for tensor in (self.w.state.master, self.w.state.exp_avg, self.w.state.exp_avg_sq):
            self.w.group.share_tensor(tensor)
        self.w.state.publish()

    def _read_newest(self) -> None:
        """Load the newest whole checkpoint, if any; corrupt ones are named, and the one before them is used."""
        corrupt: list[str] = []
        newest: int | None = None
        for path in checkpoint.newest_first(self.w.run.checkpoints):
            newest = newest if newest is not None else int(path.name.removeprefix("step-"))
            try:
                self._adopt(checkpoint.read(path, self.w.state))
            except checkpoint.Corrupt as error:
                corrupt.append(f"{path}: {error}")
                continue
            if corrupt:
                message = f"corrupt checkpoint {'; '.join(corrupt)}. Going on from step {self.step}"
                self.w.emit(Warned(at=self.w.clock(), message=f"{message}: {newest - self.step} steps lost."))
            return
        if corrupt:
            raise Refusal(
                "checkpoint-corrupt",
                what="no checkpoint of this run can be used",
                where=self.w.run.checkpoints,
                fact="; ".join(corrupt),
                remedy="start again: farspan train run.yaml --run NEW_FOLDER",
            )

    def _adopt(self, progress: Progress) -> None:
        if progress.plan != self.w.plan.hash:
            raise Refusal(
                "plan-mismatch",
                what="the checkpoint belongs to another plan",
                where=self.w.run.checkpoints,
                fact=f"made by plan {progress.plan}, this is plan {self.w.plan.hash}",
                remedy="restore this run's plan.json, or start a new run: farspan train run.yaml --run NEW_FOLDER",
            )
        self.progress, self.loss_scale, self.quiet = progress, progress.loss_scale, progress.quiet
        self.step = self._saved_step = progress.step
        self.steps = progress.steps or self.w.plan.train.steps
