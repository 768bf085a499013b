"""The training loop of one worker: batches in plan order, one update a step, and what is decided
between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Literal

import numpy as np
from msgspec.structs import replace

from farspan.domain.codec import is_content_hash, load
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.results import STOPPED, Rescheduled, Saved, Step, Traced, Warned
from farspan.domain.words import joined
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.checkpoint import Unsaved
from farspan.runtime.checkpoint.layout import TrainerState
from farspan.runtime.checkpoint.save import Checkpointer, Written
from farspan.runtime.device import peak_memory
from farspan.runtime.parallel.executor import Outcome
from farspan.runtime.time_budget import RunWork, TimeBudget
from farspan.runtime.training.batches import Batches
from farspan.runtime.training.loss_outlier import PATIENCE, LossOutliers
from farspan.runtime.training.parts import Worker
from farspan.runtime.training.validation import Validation
from farspan.semantics.identity import training_key, unlike_training
from farspan.semantics.lr_schedule import learning_rate

#: Loss scaling for fp16 as in arXiv 1710.03740, section 4.2: start high, halve on overflow, double
#: after a quiet while.
FIRST_LOSS_SCALE = 2.0**16
QUIET_STEPS = 2000
#: What mends a loss that is not finite.
LOWER = "lower train.optimizer.lr in run.yaml, then: farspan train run.yaml --run FOLDER"
#: A signal that ends a whole run reaches its workers within so many seconds of each other, as
#: agents of several hosts pass it on: a choice. They ask each other so often meanwhile.
SPREAD_S = 1.0
LOOK_S = 0.05
#: Steps whose spans are recorded: the second and third of a start, and one of so many later.
TRACED_FIRST = (1, 2)
TRACED_EVERY = 200


class Trainer:
    """Runs the steps of a plan from where its newest whole checkpoint left off."""

    def __init__(
        self,
        worker: Worker,
        monotonic: Callable[[], float] = time.monotonic,
        began: float | None = None,
        *,
        background: bool = True,
    ) -> None:
        """A time budget counts from `began`, a time of the same clock; None is now. Without
        `background` a checkpoint is written before training goes on."""
        self.worker = worker
        self.monotonic = monotonic
        train = worker.plan.train
        self.batches = Batches(worker)
        self.checkpointer = Checkpointer(
            worker.executor,
            worker.run.checkpoints,
            worker.group,
            written=self._on_saved,
            warn=lambda message: self._warn(message, until="saved"),
            monotonic=monotonic,
            background=background,
        )
        self.strays = LossOutliers(worker.executor.topology.replica, train.seq_len)
        self.state = TrainerState(
            step=0,
            steps=train.steps,
            plan=worker.plan.hash,
            training=training_key(worker.plan),
            elapsed_s=0.0,
            loss_scale=FIRST_LOSS_SCALE if train.precision == "fp16" else 1.0,
            epoch=worker.epoch.number,
            left_out=worker.epoch.skip,
        )
        #: Seconds of the run in earlier starts.
        self._used_s = 0.0
        self.validation = Validation(worker, self.state, self.batches.on_device, monotonic)
        self.budget = TimeBudget(train, self._work(), lambda: self.elapsed_s)
        self.budget.resume(0, self.state.budget)
        self._saved_at = monotonic()
        self._started = self._saved_at if began is None else began
        self._first_step = 0
        replicas = worker.plan.replicas
        #: Whether sums of gradients are rounded in a synchronous run; whether the coming step sends
        #: what that has left, and why the run stops after it, if it does.
        self._rounds = len(replicas) == 1 and any(
            stage.grad_sync.bits < 32 for stage in replicas[0].stages
        )
        self._settling = False
        self._stopping = ""
        #: The ranks whose preemption has ended this start, if one has.
        self.preempted: tuple[int, ...] = ()

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run, over all its starts."""
        return self._used_s + self.monotonic() - self._started

    def _work(self) -> RunWork:
        train = self.worker.plan.train
        read = self.validation
        return RunWork(
            step_tokens=train.tokens_per_step,
            validate_every=train.validate_every,
            validation_tokens=read.tokens(read.first),
            last_tokens=read.tokens(read.most),
            checkpoint_bytes=checkpoint.bytes_needed(self.worker.plan),
            checkpoint_every_s=train.checkpoint_every_s,
        )

    # -- the loop
    #   --------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train to the end, the deadline, an early stop, a request to stop or a preemption; returns
        which. The last state is saved."""
        train = self.worker.plan.train
        reason = self._ended()
        self._first_step = self.state.step
        while not reason:
            began = time.perf_counter()
            spans = self.worker.executor.spans
            spans.on = (
                self.state.step - self._first_step in TRACED_FIRST
                or self.state.step % TRACED_EVERY == TRACED_EVERY - 1
            )
            if self.state.step in self.state.left_out:
                self._leave_out()
            else:
                self.worker.executor.grad_reducer.settles = self._settling
                with self.worker.group.step():
                    loss, norm, tokens, lr = self._step(self.state.step)
                self.state.step += 1
                self.worker.emit(
                    Step(
                        at=self.worker.clock(),
                        step=self.state.step,
                        loss=loss,
                        lr=lr,
                        grad_norm=norm,
                        tokens=tokens,
                        step_s=time.perf_counter() - began,
                        memory_bytes=peak_memory(self.worker.group.device),
                        steps=None if train.deadline_s is None else self.state.steps,
                    )
                )
            if spans.on:
                self.worker.emit(
                    Traced(
                        at=self.worker.clock(),
                        step=self.state.step,
                        rank=self.worker.group.rank,
                        spans=spans.take(),
                    )
                )
            self.checkpointer.poll()
            together = self._together()
            first = self.state.step == self._first_step + 1
            unknown = self.budget.stepped(self.state.step) if together or first else False
            if not together:
                continue
            if unknown and not first:  # How long a validation takes: all read a few windows.
                self.validation.read_timed(
                    0, min(self.validation.first, self.validation.round), self.budget
                )
                self.budget.goes_on()
            # The last validation, which comes with the end, reads more.
            if self._due(train.validate_every) and self.state.step < self.state.steps:
                self._validate()
                self.budget.goes_on()
            reason, save = self._settled(*self._decide())
            if not reason and save:
                self.save(due=True)
                self.budget.goes_on()
        return self._finish(reason)

    def _settled(self, reason: str, save: bool) -> tuple[str, bool]:
        """Why to stop and whether to save, where gradients travel in fewer bits than 32: one step
        later, which sends what rounding has left of those before. So no checkpoint lacks it."""
        if self._settling:
            self._settling = False
            stopping = self._stopping
            return stopping or reason, True
        if not self._rounds or not (save or reason in STOPPED):
            return reason, save
        self._settling = True
        self._stopping = reason
        return "", False

    def _leave_out(self) -> None:
        """Go past a batch whose gradient was not finite before the run went back to its
        checkpoint."""
        self.state.step += 1
        self.state.skipped += 1
        self._warn(
            f"step {self.state.step}: its batch is left out, as its loss or gradient was not "
            "finite before"
        )

    def _finish(self, reason: str) -> str:
        """Save the last state: unless the run will go on from there, one model of all replicas,
        which is then validated for as long as there is time. Returns why the run ends, as all know
        by then."""
        outer = self.worker.executor.outer
        if outer is not None and outer.under_way and reason not in STOPPED:
            self.worker.executor.finish(self.state.step)
            self.checkpointer.step = (
                self.validation.step
            ) = -1  # This is not the model that had been saved or validated.
        self.save(last=True)
        if reason in STOPPED:
            reason = self._stop_reason()
        else:
            self._validate(last=True)
        if outer is not None:
            outer.close()
        self.checkpointer.close()
        return reason

    def _stop_reason(self) -> str:
        """Agree on why all stop, once the state is saved. A signal that comes to all workers is a
        stop, whoever sent it; it does not come to all at once."""
        group = self.worker.group
        ranks = tuple[int, ...]()
        for _ in range(round(SPREAD_S / LOOK_S)):
            asked = group.gather(float(self.worker.stop()))
            signalled = group.gather(float(self.worker.preempted()))
            ranks = tuple(rank for rank, came in enumerate(signalled) if came)
            if any(asked) or len(ranks) in (0, group.world):
                return "interrupted"
            time.sleep(LOOK_S)
        self.preempted = ranks
        return "preempted"

    def _together(self) -> bool:
        """Whether all replicas are at one place: always where there is one, else after they have
        met."""
        outer = self.worker.executor.outer
        sync = self.worker.plan.sync
        if outer is None or sync is None:
            return True
        last = self.state.step >= self.state.steps
        if self.state.step % sync.every and not last:
            return False
        self.worker.executor.meet(self.state.step, last)
        return True

    def _due(self, every: int) -> bool:
        """Whether a multiple of `every` steps was reached since all were last together."""
        apart = self.worker.plan.sync.every if self.worker.plan.sync is not None else 1
        return self.state.step % every < min(apart, every)

    def _ended(self) -> str:
        if self.state.step >= self.worker.plan.train.step_limit:
            return "done"
        return "deadline" if self.state.step >= self.state.steps else ""

    def _decide(self) -> tuple[str, bool]:
        """Why to stop, if at all, and whether to save: agreed by all workers. A request or a signal
        anywhere stops all; rank 0's clock decides the rest; validations gave all the same. Workers
        of one replica hear of it a step later, without waiting for each other."""
        group = self.worker.group
        train = self.worker.plan.train
        steps = 0
        save = False
        share = 0.0
        if group.rank == 0:
            save = self.monotonic() - self._saved_at >= train.checkpoint_every_s
            steps, share, save = self.budget.say(self.state.step, self.state.steps, save)
            if save:
                self._saved_at = self.monotonic()  # Said once: it is heard and done a step later.
        stop = float(self.worker.stop())
        preempted = float(self.worker.preempted())
        mine = (stop, preempted, float(steps), float(save), share)
        exchange = self.worker.executor.decisions
        if len(self.worker.plan.replicas) > 1:
            stop, preempted, new, due, used = group.sum(*mine)
        else:
            exchange.say(mine)
            if exchange.others and exchange.unheard < 2 and self.state.step < self.state.steps:
                return "", False
            stop, preempted, new, due, used = (
                sum(values) for values in zip(*exchange.hear().values(), strict=True)
            )
        # Decided a step ago, it may say to end where this step has already gone.
        self.state.steps = max(int(new), self.state.step)
        reports = self.budget.hear(self.state.step, used, bool(due))
        if reports and self.state.steps != train.steps:
            self.worker.emit(
                Rescheduled(
                    at=self.worker.clock(),
                    step=self.state.step,
                    steps=self.state.steps,
                    planned=train.steps,
                )
            )
        stale = 0 < train.patience <= self.state.stale
        if stop:
            reason = "interrupted"
        else:
            reason = self._ended() or ("preempted" if preempted else "early-stop" if stale else "")
        return reason, bool(due)

    def _step(self, step: int) -> tuple[float, float, int, float]:
        """One update. Returns the mean loss and the gradient norm before clipping of this worker's
        replica, the valid tokens of all, and the learning rate."""
        train = self.worker.plan.train
        executor = self.worker.executor
        valid_tokens, outcome = self.gradients(step)
        norm = outcome.norm / self.state.loss_scale
        loss = outcome.loss / valid_tokens
        followed = self.budget.followed(step, self.state.steps)
        lr = learning_rate(
            train.schedule,
            train.optimizer.lr,
            step,
            train.steps,
            followed,
            limit=train.step_limit,
            total=self.state.steps,
        )
        if self._finite(step, loss, norm, outcome):
            self._refuse_stray(step, outcome)
            clip = train.optimizer.clip
            excess = max(1.0, norm / clip) if clip else 1.0
            executor.update(
                train.optimizer, lr, step + 1 - self.state.skipped, self.state.loss_scale * excess
            )
        if len(self.worker.plan.replicas) > 1:
            every = np.arange(step * train.batch, (step + 1) * train.batch)
            valid_tokens = self.batches.valid(every)
        return loss, norm, valid_tokens, lr

    def gradients(self, step: int) -> tuple[int, Outcome]:
        """The gradients of one step, in the state: of the mean loss times the loss scale. Returns
        the valid tokens."""
        topology = self.worker.executor.topology
        executor = self.worker.executor
        tokens = np.empty(0, dtype=np.int64)
        valid_tokens = self.batches.valid(topology.replica_samples(step))
        if executor.tied is not None:
            tokens = self.batches.read(topology.replica_samples(step))[0]
        mine = topology.samples(step)
        scale = self.state.loss_scale / valid_tokens
        return valid_tokens, executor.gradients(tokens, lambda i: self.batches.of(mine[i]), scale)

    # -- what can go wrong
    #   -----------------------------------------------------------------------------------------

    def _finite(self, step: int, loss: float, norm: float, outcome: Outcome) -> bool:
        """True to update. An fp16 overflow skips the update and halves the scale; anything else
        refuses to go on."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.state.quiet += 1
            if self.worker.plan.train.precision == "fp16" and self.state.quiet % QUIET_STEPS == 0:
                self.state.loss_scale *= 2
            return True
        self.worker.executor.skip()
        if math.isfinite(loss) and self.state.loss_scale > 1.0:
            self.state.loss_scale /= 2
            self.state.quiet = 0
            self.state.skipped += 1
            return False
        samples = self.worker.executor.topology.replica_samples(step)
        raise Refusal(
            "non-finite",
            what=f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite at step "
            f"{step + 1}; the update "
            "was not made",
            where=(
                f"rank {', '.join(map(str, outcome.faulty)) or 'any'}, among samples "
                f"{samples[0]} to {samples[-1]}"
            ),
            fact=f"loss {loss}, gradient norm {norm}, learning rate so far up to "
            f"{self.worker.plan.train.optimizer.lr:g}; {self.checkpointer.kept}",
            remedy=LOWER,
            step=step,
        )

    def _refuse_stray(self, step: int, outcome: Outcome) -> None:
        """Warn of a worker whose loss is far above the others', and do not go on with one whose
        loss stays there."""
        outlier = self.strays.look({rank: loss for rank, (loss, _) in outcome.by_rank.items()})
        if outlier is None:
            return
        device = self.worker.plan.devices[outlier.rank]
        samples = self.worker.executor.topology.replica_samples(step)
        fact = f"{outlier.loss:.2f} nats a token where the others have {outlier.others:.2f}"
        where = f"rank {outlier.rank} ({device.backend} {device.index} of {device.host})"
        if outlier.steps == 1 and self.worker.group.rank == 0:
            message = (
                f"step {step + 1}: the loss of {where} is {fact}, among samples {samples[0]} to "
                f"{samples[-1]}"
            )
            self.worker.emit(Warned(at=self.worker.clock(), message=message))
        if outlier.steps < PATIENCE:
            return
        raise Refusal(
            "loss-spike",
            what=f"the loss of one worker is far above the others' for {PATIENCE} steps on end",
            where=where,
            remedy=self.worker.run.resume(),
            fact=(
                f"{fact}, at step {step + 1}: its memory, processor or copy of the corpus is "
                "damaged"
            ),
        )

    # -- validation and checkpoints
    #   --------------------------------------------------------------------------------

    def _validate(self, last: bool = False) -> None:
        """Measure the loss, and keep the weights if it is the best so far."""
        with self.worker.executor.met():
            measured = self.validation.measure(self.state.step, self.budget, last=last)
        if measured is None:
            return
        if not math.isfinite(measured.sums.mean):
            saved = self.save(wait=True)
            raise Refusal(
                "non-finite",
                what=f"the validation loss is not finite after step {self.state.step}",
                where="the validation split",
                remedy=LOWER,
                fact=f"loss {measured.sums.mean}, though losses in training were finite; "
                f"{'these weights are kept' if saved else self.checkpointer.kept}",
            )
        before = self.state.best_loss
        best = self.validation.judge(self.state.step, measured)
        self.worker.emit(self.validation.report(self.state.step, measured, best))
        if best:
            try:
                self.checkpointer.save_best(self._snapshot(), self.worker.run.best)
            except Unsaved as error:
                # Those that are there are still the best: the next loss below theirs is written.
                self.state.best_loss = before
                kept = "there are none" if before is None else "those before stay"
                self._warn(
                    f"step {self.state.step}: the best weights could not be written: {error}; "
                    f"{kept}",
                    until="best",
                )

    def _snapshot(self) -> TrainerState:
        """Return a copy of the state, which is written while training goes on."""
        self.state.elapsed_s = self.elapsed_s
        return deepcopy(self.state)

    def save(self, *, due: bool = False, last: bool = False, wait: bool = False) -> bool:
        """Save the state as it is (`Checkpointer.save`)."""
        self._saved_at = self.monotonic()
        return self.checkpointer.save(self._snapshot(), due=due, last=last, wait=wait)

    def _on_saved(self, written: Written) -> None:
        """On rank 0: a checkpoint is in its place."""
        self.budget.saved(written.seconds)
        self.worker.emit(
            Saved(
                at=self.worker.clock(),
                step=written.step,
                path=str(written.path),
                size_bytes=written.size,
                seconds=written.seconds,
            )
        )

    def _warn(self, message: str, until: Literal["saved", "best"] | None = None) -> None:
        """Rank 0 says what all know."""
        if self.worker.group.rank == 0:
            self.worker.emit(Warned(at=self.worker.clock(), message=message, until=until))

    def restore(self) -> None:
        """Go on from the newest whole checkpoint, if any: every worker reads its part."""
        there = self.checkpointer.restore(self._adopt, self._warn)
        # What was lost, and the time until somebody went on, counts too.
        self._used_s = max(self.state.elapsed_s, self.worker.epoch.used_s)
        if there and (outer := self.worker.executor.outer) is not None:
            # One whose steps all overflowed, or that owns nothing, sees no change: the others may.
            outer.resume(any(self.worker.group.sum(outer.apart)))

    def _former(self, progress: TrainerState) -> Plan | None:
        """The run's former plan that made a checkpoint, where it is kept."""
        if not is_content_hash(progress.plan):
            return None
        path = self.worker.run.plans / f"{progress.plan}.json"
        return load(path, Plan) if path.exists() else None

    def _adopt(self, progress: TrainerState) -> None:
        plan = self.worker.plan
        run = self.worker.run
        if progress.training != self.state.training:
            former = self._former(progress)
            unlike = (
                "model, text or training"
                if former is None
                else joined(unlike_training(former, plan))
            )
            raise Refusal(
                "plan-mismatch",
                what="the checkpoint belongs to another training",
                where=run.checkpoints,
                fact=(
                    f"plan {progress.plan}, which made it, has another {unlike} than plan "
                    f"{plan.hash}"
                ),
                remedy=(
                    "restore this run's plan.json, or start a new run: farspan train run.yaml "
                    "--run NEW_FOLDER"
                ),
            )
        skip = tuple(sorted({*progress.left_out, *self.worker.epoch.skip}))
        found = replace(
            deepcopy(progress),
            steps=progress.steps or plan.train.steps,
            plan=plan.hash,
            epoch=self.worker.epoch.number,
            left_out=skip,
        )
        for name in TrainerState.__struct_fields__:  # Validations have this same object.
            setattr(self.state, name, getattr(found, name))
        self.budget.resume(self.state.step, self.state.budget)
