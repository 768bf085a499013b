"""The training loop of one worker: batches in plan order, one update a step, and what is decided
between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Literal

from msgspec.structs import replace

from farspan.domain.plan import Plan
from farspan.domain.plan_words import join_words
from farspan.domain.problems import Refusal
from farspan.domain.run_events import STOP_REASONS, Rescheduled, Saved, Step, Traced, Warned
from farspan.domain.struct_files import is_content_hash, load
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.checkpoint_folder import Unsaved
from farspan.runtime.checkpoint.last_step import WholeState
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.checkpoint.save import Checkpointer, Written
from farspan.runtime.device import peak_memory
from farspan.runtime.parallel.executor import Outcome
from farspan.runtime.state.train_state import update_scalars
from farspan.runtime.time_budget import RunWork, TimeBudget
from farspan.runtime.training.batches import Batches
from farspan.runtime.training.loss_outlier import PATIENCE, LossOutliers
from farspan.runtime.training.prefetch import ReadStep
from farspan.runtime.training.recorded_steps import RecordedSteps, StepResult
from farspan.runtime.training.validation import Validation
from farspan.runtime.training.worker_parts import Worker
from farspan.semantics.compile_choice import records_graph
from farspan.semantics.identity import training_key, unlike_training
from farspan.semantics.lr_schedule import learning_rate
from farspan.semantics.state_copies import has_copies

#: Loss scaling for fp16 as in arXiv 1710.03740, section 4.2: start high, halve on overflow, double
#: after a quiet while.
FIRST_LOSS_SCALE = 2.0**16
QUIET_STEPS = 2000
#: What mends a loss that is not finite.
LOWER = "lower train.optimizer.lr in run.yaml, then: farspan train run.yaml --run FOLDER"
#: A signal that ends a whole run reaches its workers within this many seconds of each other, as
#: agents of several hosts pass it on: a choice. They ask each other every LOOK_S meanwhile.
SPREAD_S = 1.0
LOOK_S = 0.05
#: Steps whose spans are recorded: the second and third of a start, and every 200th one.
TRACED_FIRST = (1, 2)
TRACED_EVERY = 200
#: Steps between two questions for a GPU's peak of memory, which take 0.2 ms each.
MEMORY_EVERY = 50


def clip_divisor(norm: float, clip: float) -> float:
    """Return the divisor of gradients that brings their norm to at most `clip`; 0 clips none."""
    return max(1.0, norm / clip) if clip else 1.0


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
        """Build a trainer. A time budget counts from `began`, of the same clock; None is now.
        Without `background` training waits while a checkpoint is written."""
        self.worker = worker
        self.monotonic = monotonic
        train = worker.plan.train
        self.batches = Batches(worker)
        self.checkpointer = Checkpointer(
            worker.executor,
            worker.run.checkpoints,
            worker.group,
            written=self._on_saved,
            warn=lambda message: self._emit_warning(message, until="saved"),
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
        validation = Validation(worker, self.state, self.batches.on_device, monotonic)
        self.validation = validation
        work = RunWork(
            step_tokens=train.tokens_per_step,
            validate_every=train.validate_every,
            validation_tokens=validation.tokens(validation.first),
            last_tokens=validation.tokens(validation.most),
            checkpoint_bytes=checkpoint_folder.bytes_needed(worker.plan),
            checkpoint_every_s=train.checkpoint_every_s,
        )
        self.budget = TimeBudget(train, work, lambda: self.elapsed_s)
        self.budget.resume(0, self.state.budget)
        self._saved_at = monotonic()
        self._started = self._saved_at if began is None else began
        replicas = worker.plan.replicas
        #: Whether gradient sums are quantized in a synchronous run; whether the coming step flushes
        #: the residuals, and why the run stops after it, if it does.
        self._quantizes_sync = False
        if len(replicas) == 1:
            stages = replicas[0].stages
            self._quantizes_sync = any(stage.grad_sync.bits < 32 for stage in stages)
        self._flushing = False
        self._reason_after_flush = ""
        self._peak_bytes = 0
        #: What launches the steps where the plan has them recorded.
        self.recorded: RecordedSteps | None = None
        if records_graph(worker.plan, worker.group.rank):
            self.recorded = RecordedSteps(
                worker.executor, train, self.batches.layout, self._emit_warning
            )
        #: The ranks whose preemption has ended this start, if one has.
        self.preempted: tuple[int, ...] = ()
        #: Those of them whose hosts are being taken away.
        self.leaving: tuple[int, ...] = ()
        self._whole = WholeState(worker.group.device)
        self._last_result: StepResult | None = None
        self._keeps_last_step = has_copies(worker.plan) and self.recorded is None

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run, over all its starts."""
        return self._used_s + self.monotonic() - self._started

    # -- the loop
    #   --------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train to the end, the deadline, an early stop, a request to stop or a preemption; returns
        which. The last state is saved."""
        worker = self.worker
        state = self.state
        budget = self.budget
        validation = self.validation
        spans = worker.executor.spans
        first_step = state.step
        if state.validation_due:
            self._validate()
        reason = self._end_reason()
        while not reason:
            # A recorded step has no parts that the host could see.
            periodic = state.step % TRACED_EVERY == TRACED_EVERY - 1 and self.recorded is None
            spans.on = periodic or state.step - first_step in TRACED_FIRST
            if state.step in state.left_out:
                # Its gradient was not finite before the run went back to its checkpoint.
                state.step += 1
                state.skipped += 1
                self._emit_warning(
                    f"step {state.step}: its batch is left out, as its loss or gradient was not "
                    "finite before"
                )
            else:
                worker.executor.grad_reducer.flush_residuals = self._flushing
                with worker.group.step():
                    results = self._train_step(state.step)
                # A step is reported once: here, or by `write_last_step`.
                with self._whole.hold():
                    for result in results:
                        self._emit_step(result)
            if spans.on:
                now = worker.clock()
                rank = worker.group.rank
                worker.emit(Traced(at=now, step=state.step, rank=rank, spans=spans.take()))
            self.checkpointer.poll()
            synced = self._sync_replicas()
            first = state.step == first_step + 1
            unmeasured = budget.measure_step(state.step) if synced or first else False
            if not synced:
                continue
            # Measure how long a validation takes: all read a few windows.
            if unmeasured and not first:
                self._take_last_results()
                validation.read_timed(0, min(validation.first, validation.round), budget)
                budget.restart_step_clock()
            if self._validates_after(state.step):
                self._validate()
                budget.restart_step_clock()
            reason, save = self._agree_on_stop_and_save()
            reason, save = self._flush_residuals_before_save(reason, save)
            if not reason and save:
                self.save(due=True)
                budget.restart_step_clock()
        return self._save_last_state(reason)

    def _validates_after(self, step: int) -> bool:
        """Return whether a multiple of `validate_every` steps was reached since the last outer
        sync. The last validation comes with the end, and reads more."""
        plan = self.worker.plan
        every = plan.train.validate_every
        interval = 1 if plan.sync is None else plan.sync.every
        return step % every < min(interval, every) and step < self.state.steps

    def _flush_residuals_before_save(self, reason: str, save: bool) -> tuple[str, bool]:
        """Delay a stop or a save by one step when gradient sync is quantized.

        The error-feedback residuals live only in memory. The extra step sends them in fp32, so the
        checkpoint written after it loses nothing.
        """
        if self._flushing:
            self._flushing = False
            return self._reason_after_flush or reason, True
        if not self._quantizes_sync or not (save or reason in STOP_REASONS):
            return reason, save
        self._flushing = True
        self._reason_after_flush = reason
        return "", False

    def _save_last_state(self, reason: str) -> str:
        """Save the last state: unless the run will resume from there, one model of all replicas,
        which is then validated for as long as there is time. Returns why the run ends, as all know
        by then."""
        self._take_last_results()
        executor = self.worker.executor
        outer = executor.outer
        if outer is not None and outer.under_way and reason not in STOP_REASONS:
            executor.finish_outer_sync(self.state.step)
            # This is not the model that had been saved or validated.
            self.checkpointer.step = -1
            self.validation.step = -1
        self.save(last=True)
        if reason in STOP_REASONS:
            reason = self._stop_reason()
        else:
            self._validate(last=True)
        if outer is not None:
            outer.close_messages()
        self.checkpointer.close()
        self.batches.close()
        return reason

    def _stop_reason(self) -> str:
        """Agree on why all stop, once the state is saved. A signal that comes to all workers is a
        stop, whoever sent it, but for a cloud's notice; it does not come to all at once."""
        group = self.worker.group
        ranks = tuple[int, ...]()
        for _ in range(round(SPREAD_S / LOOK_S)):
            asked = group.all_gather(float(self.worker.stop()))
            signalled = group.all_gather(float(self.worker.preempted()))
            noticed = group.all_gather(float(self.worker.noticed()))
            ranks = tuple(rank for rank, signal in enumerate(signalled) if signal)
            is_stop = len(ranks) == group.world and not any(noticed)
            if any(asked) or not ranks or is_stop:
                return "interrupted"
            time.sleep(LOOK_S)
        self.preempted = ranks
        leaves = group.rank in ranks and self.worker.host_leaves()
        leaving = group.all_gather(float(leaves))
        self.leaving = tuple(rank for rank in ranks if leaving[rank])
        return "preempted"

    def _sync_replicas(self) -> bool:
        """Run the outer step of several replicas if it is due; return whether all are synced,
        which a single replica always is."""
        executor = self.worker.executor
        sync = self.worker.plan.sync
        if executor.outer is None or sync is None:
            return True
        step = self.state.step
        last = step >= self.state.steps
        if step % sync.every and not last:
            return False
        executor.synchronize_replicas(step, last)
        return True

    def _end_reason(self) -> str:
        state = self.state
        train = self.worker.plan.train
        if state.step >= train.step_limit:
            return "done"
        if state.step >= state.steps:
            return "deadline"
        return "early-stop" if 0 < train.patience <= state.stale else ""

    def _agree_on_stop_and_save(self) -> tuple[str, bool]:
        """Agree with all workers on why to stop, if at all, and whether to save.

        A request or a signal anywhere stops all; rank 0's clock decides the rest; validations gave
        all the same. Workers of one replica learn of it a step later, without waiting for each
        other.
        """
        worker = self.worker
        state = self.state
        train = worker.plan.train
        step = state.step
        # This worker's proposal.
        steps = 0
        save = False
        share = 0.0
        if worker.group.rank == 0:
            save = self.monotonic() - self._saved_at >= train.checkpoint_every_s
            steps, share, save = self.budget.propose_steps(step, state.steps, save)
            if save:
                self._saved_at = self.monotonic()  # Proposed once: it is done a step later.
        stop = float(worker.stop())
        preempted = float(worker.preempted())
        own = stop, preempted, float(steps), float(save), share
        # The sum of all proposals.
        exchange = worker.executor.decisions
        if len(worker.plan.replicas) > 1:
            agreed = worker.group.all_reduce_sum(*own)
        else:
            exchange.send_values(own)
            if exchange.others and exchange.num_unreceived < 2 and step < state.steps:
                return "", False
            agreed = [
                sum(values) for values in zip(*exchange.receive_values().values(), strict=True)
            ]
        stop, preempted, new_steps, due, used = agreed
        # Decided a step ago, it may be to end where this step has already gone.
        state.steps = max(int(new_steps), step)
        reports = self.budget.take_proposal(step, used, bool(due))
        if reports and state.steps != train.steps:
            now = worker.clock()
            worker.emit(Rescheduled(at=now, step=step, steps=state.steps, planned=train.steps))
        reason = "interrupted" if stop else self._end_reason()
        if not reason and preempted:
            reason = "preempted"
        return reason, bool(due)

    def _train_step(self, step: int) -> list[StepResult]:
        """Make one update. Returns the results that are known: of this step, or where steps are
        recorded of the one before it."""
        began = time.perf_counter()
        train = self.worker.plan.train
        state = self.state
        executor = self.worker.executor
        read = self.batches.read_step(step)
        used_time = self.budget.lr_progress(step, state.steps)
        lr = learning_rate(
            train.schedule,
            train.optimizer.lr,
            step,
            train.steps,
            used_time,
            limit=train.step_limit,
            total=state.steps,
        )
        updates = step + 1 - state.skipped
        if self.recorded is not None:
            scalars = update_scalars(train.optimizer, lr, updates)
            self.recorded.launch(step, read, scalars, state.loss_scale / read.valid)
            state.step += 1
            return self._take_results(unread=1)

        outcome = self.compute_gradients(read)
        # Until here the state is that of the step before; a worker that is lost may end this one.
        with self._whole.change():
            norm = outcome.norm / state.loss_scale
            loss = outcome.loss / read.valid
            is_updated = self._check_finite_adjust_loss_scale(step, loss, norm, outcome)
            if is_updated:
                self._refuse_stray(step, outcome)
                divisor = state.loss_scale * clip_divisor(norm, train.optimizer.clip)
                executor.update_state(train.optimizer, lr, updates, divisor)
            state.step += 1
            seconds = time.perf_counter() - began
            result = StepResult(step, loss, norm, read.valid_of_all, lr, seconds)
            self._last_result = result
            self._mark_whole(validation_due=self._validates_after(state.step))
        if is_updated:
            executor.publish_update()
        return [result._replace(seconds=time.perf_counter() - began)]

    def _mark_whole(self, *, validation_due: bool = False) -> None:
        """Note that the state is that of a whole step, which survivors of a lost worker may write:
        where all that the next step depends on is in a checkpoint."""
        if self._keeps_last_step:
            # Once a step: much quicker than `deepcopy`.
            budget = replace(self.state.budget)
            self._whole.trainer = replace(self.state, budget=budget, validation_due=validation_due)

    def compute_gradients(self, read: ReadStep) -> Outcome:
        """Compute the gradients of one step, in the state: of the mean loss times the loss
        scale."""
        scale = self.state.loss_scale / read.valid
        return self.worker.executor.compute_gradients(
            read.replica_tokens, lambda i: self.batches.microbatch(read, i), scale
        )

    def _take_results(self, unread: int) -> list[StepResult]:
        """Return the results of the steps that were launched but the `unread` newest."""
        if self.recorded is None:
            return []
        results = self.recorded.take_results(unread)
        rank = self.worker.group.rank
        for result in results:
            outcome = Outcome(result.loss, result.norm, {rank: (result.loss, result.norm**2)})
            self._check_finite_adjust_loss_scale(result.step, result.loss, result.norm, outcome)
        return results

    def _take_last_results(self) -> None:
        """Learn what came of all steps, before the weights are used otherwise."""
        for result in self._take_results(unread=0):
            self._emit_step(result)

    def _emit_step(self, result: StepResult) -> None:
        self.worker.emit(self._step_event(result))

    def _step_event(self, result: StepResult) -> Step:
        timed = self.worker.plan.train.deadline_s is not None
        steps = self.state.steps if timed else None
        memory = self._peak_memory(result.step)
        return Step(
            at=self.worker.clock(),
            step=result.step + 1,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.norm,
            tokens=result.valid,
            step_s=result.seconds,
            memory_bytes=memory,
            steps=steps,
        )

    def _peak_memory(self, step: int) -> int:
        """Return the peak of memory; a GPU's allocator is asked seldom, as that takes long."""
        device = self.worker.group.device
        seldom = device.type == "cuda" and self._peak_bytes > 0
        if not seldom or step % MEMORY_EVERY == 0:
            self._peak_bytes = peak_memory(device)
        return self._peak_bytes

    # -- what can go wrong
    #   -----------------------------------------------------------------------------------------

    def _check_finite_adjust_loss_scale(
        self, step: int, loss: float, norm: float, outcome: Outcome
    ) -> bool:
        """Return whether to update. An fp16 overflow skips the update and halves the scale.

        Raises Refusal (non-finite) for anything else that is not finite.
        """
        state = self.state
        train = self.worker.plan.train
        if math.isfinite(loss) and math.isfinite(norm):
            state.quiet += 1
            if train.precision == "fp16" and state.quiet % QUIET_STEPS == 0:
                state.loss_scale *= 2
            return True
        self.worker.executor.skip_step()
        if math.isfinite(loss) and state.loss_scale > 1.0:
            state.loss_scale /= 2
            state.quiet = 0
            state.skipped += 1
            return False
        samples = self.worker.executor.topology.replica_samples(step)
        ranks = ", ".join(map(str, outcome.faulty)) or "any"
        quantity = "gradient" if math.isfinite(loss) else "loss"
        raise Refusal(
            "non-finite",
            what=f"the {quantity} is not finite at step {step + 1}; the update was not made",
            where=f"rank {ranks}, among samples {samples[0]} to {samples[-1]}",
            fact=f"loss {loss}, gradient norm {norm}, learning rate so far up to "
            f"{train.optimizer.lr:g}; {self.checkpointer.kept}",
            remedy=LOWER,
            step=step,
        )

    def _refuse_stray(self, step: int, outcome: Outcome) -> None:
        """Warn of a worker with a loss far above the others', and refuse to continue if it stays
        there."""
        losses = {rank: loss for rank, (loss, _) in outcome.by_rank.items()}
        outlier = self.strays.find_outlier(losses)
        if outlier is None:
            return
        device = self.worker.plan.devices[outlier.rank]
        fact = f"{outlier.loss:.2f} nats a token where the others have {outlier.others:.2f}"
        where = f"rank {outlier.rank} ({device.backend} {device.index} of {device.host})"
        if outlier.steps == 1:
            samples = self.worker.executor.topology.replica_samples(step)
            self._emit_warning(
                f"step {step + 1}: the loss of {where} is {fact}, among samples {samples[0]} to "
                f"{samples[-1]}"
            )
        if outlier.steps < PATIENCE:
            return
        raise Refusal(
            "loss-spike",
            what=f"the loss of one worker is far above the others' for {PATIENCE} steps on end",
            where=where,
            remedy=self.worker.run.resume_command(),
            fact=(
                f"{fact}, at step {step + 1}: its memory, processor or copy of the corpus is "
                "damaged"
            ),
        )

    # -- validation and checkpoints
    #   --------------------------------------------------------------------------------

    def _validate(self, last: bool = False) -> None:
        """Measure the loss, and keep the weights if it is the best so far."""
        self._take_last_results()
        step = self.state.step
        # A validation swaps the averaged weights in.
        swaps = bool(self.worker.executor.state.average)
        changed = self._whole.change() if swaps else nullcontext()
        with changed, self.worker.executor.evaluation_weights():
            measured = self.validation.measure(step, self.budget, last=last)
        if measured is None:
            return
        if not math.isfinite(measured.sums.mean):
            saved = self.save(wait=True)
            kept = "these weights are kept" if saved else self.checkpointer.kept
            raise Refusal(
                "non-finite",
                what=f"the validation loss is not finite after step {step}",
                where="the validation split",
                remedy=LOWER,
                fact=f"loss {measured.sums.mean}, though losses in training were finite; {kept}",
            )
        previous_best = self.state.best_loss
        best = self.validation.update_best(step, measured)
        self.worker.emit(self.validation.report(step, measured, best))
        if best:
            try:
                self.checkpointer.save_best(self._copy_state(), self.worker.run.best)
            except Unsaved as error:
                # Those that are there are still the best: the next loss below theirs is written.
                self.state.best_loss = previous_best
                kept = "there are none" if previous_best is None else "those before stay"
                self._emit_warning(
                    f"step {step}: the best weights could not be written: {error}; {kept}",
                    until="best",
                )
        self.state.validation_due = False
        self._mark_whole()

    def _copy_state(self) -> TrainerState:
        """Return a copy of the state, which is written while training continues."""
        self.state.elapsed_s = self.elapsed_s
        return deepcopy(self.state)

    def save(self, *, due: bool = False, last: bool = False, wait: bool = False) -> bool:
        """Save the state as it is (`Checkpointer.save`)."""
        self._take_last_results()
        self._saved_at = self.monotonic()
        return self.checkpointer.save(self._copy_state(), due=due, last=last, wait=wait)

    def write_last_step(self, lost: int, report: Callable[[Step, Saved], None]) -> None:
        """Write the state of the last whole step after the loss of a worker, where the survivors
        hold it: the next start begins there. The worker that commits it has that step and the
        checkpoint reported. Training never continues. Raises OSError, Refusal, Unsaved."""
        whole = self._whole
        state = whole.freeze()
        if state is None or self._last_result is None:
            return
        state.elapsed_s = self.elapsed_s
        step = self._step_event(self._last_result)
        self.checkpointer.write_last_step(
            state,
            lost,
            whole.copy_to_host,
            lambda written: report(step, self._saved_event(written)),
        )

    def _on_saved(self, written: Written) -> None:
        """Report on rank 0 that a checkpoint is in its place."""
        self.budget.measure_save(written.seconds)
        self.worker.emit(self._saved_event(written))

    def _saved_event(self, written: Written) -> Saved:
        return Saved(
            at=self.worker.clock(),
            step=written.step,
            path=str(written.path),
            size_bytes=written.size,
            seconds=written.seconds,
        )

    def _emit_warning(self, message: str, until: Literal["saved", "best"] | None = None) -> None:
        """Warn on rank 0, for all workers."""
        if self.worker.group.rank == 0:
            self.worker.emit(Warned(at=self.worker.clock(), message=message, until=until))

    def restore(self) -> None:
        """Resume from the newest whole checkpoint, if any: every worker reads its part."""
        there = self.checkpointer.restore(self._adopt_state, self._emit_warning)
        if not there and self.worker.is_continued:
            # What the model was worth before the first step; it may stay the best.
            self.state.validation_due = True
        # What was lost, and the time until somebody went on, counts too.
        self._used_s = max(self.state.elapsed_s, self.worker.epoch.used_s)
        if there and (outer := self.worker.executor.outer) is not None:
            # One whose steps all overflowed, or that owns nothing, sees no change: the others may.
            outer.resume_exchange(any(self.worker.group.all_reduce_sum(outer.diverged)))

    def _adopt_state(self, progress: TrainerState) -> None:
        plan = self.worker.plan
        run = self.worker.run
        if progress.training != self.state.training:
            # The former plan that made the checkpoint, if it is kept, tells what differs.
            unlike = "model, text or training"
            former = run.plans / f"{progress.plan}.json"
            if is_content_hash(progress.plan) and former.exists():
                unlike = join_words(unlike_training(load(former, Plan), plan))
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
        epoch = self.worker.epoch
        adopted = deepcopy(progress)
        adopted.steps = progress.steps or plan.train.steps
        adopted.plan = plan.hash
        adopted.epoch = epoch.number
        adopted.left_out = tuple(sorted({*progress.left_out, *epoch.skip}))
        for name in TrainerState.__struct_fields__:  # Validations have this same object.
            setattr(self.state, name, getattr(adopted, name))
        self.budget.resume(self.state.step, self.state.budget)
