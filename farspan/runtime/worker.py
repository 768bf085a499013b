"""One worker process: `python -m farspan.runtime.worker PLAN RUN_DIR`, with RANK and WORLD_SIZE in
the environment, and for several workers where they meet (MASTER_ADDR, MASTER_PORT) and the secret
of the run (FARSPAN_SECRET).

It reads the plan, builds its part, trains, and appends events to the run directory. A refusal is
written to `logs/rank-N.problem.json` for the launcher and becomes the exit code.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch

from farspan._version import __version__
from farspan.corpus import find_prepared
from farspan.corpus import tokenizer as tokenizers
from farspan.corpus.token_files import TokenFile, split_fingerprint
from farspan.corpus.verbatim import verbatim_share
from farspan.domain import catalog
from farspan.domain import epoch_fence as epochs
from farspan.domain.corpus import SPLITS, CorpusManifest
from farspan.domain.cost import Estimate
from farspan.domain.epoch_fence import Epoch
from farspan.domain.memory_kills import own_cgroup
from farspan.domain.plan import Plan, find_flaw
from farspan.domain.preemption_problem import NOTICE_VARIABLE, preemption_problem
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import (
    STOP_REASONS,
    Event,
    Finished,
    Recovered,
    Sampled,
    Saved,
    Started,
    Step,
    Warned,
)
from farspan.domain.struct_files import load, save
from farspan.domain.train import TrainSpec
from farspan.domain.units import counted, format_bytes
from farspan.models._weight_files import require_weights
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import Corrupt
from farspan.runtime.comm.control_channel import Notices, run_secret
from farspan.runtime.comm.distribute_files import share_files
from farspan.runtime.comm.heartbeat import SILENCE_S, How
from farspan.runtime.comm.topology import Topology
from farspan.runtime.comm.worker_group import WORKER_START_S, Group, connect_workers
from farspan.runtime.compiler import keep_compiled_code
from farspan.runtime.device import (
    apply_lab_limits,
    describe_others,
    environment,
    memory_is_full,
    open_device,
)
from farspan.runtime.host_shutdown import is_host_leaving
from farspan.runtime.model import huggingface
from farspan.runtime.model.compiled_blocks import BlockInputs, compile_or_restore
from farspan.runtime.model.decoder import Decoder, initial_adapters, initial_parameters
from farspan.runtime.model.generate import generate
from farspan.runtime.model.kernel_selection import select_kernels
from farspan.runtime.model.linear import merge_adapters
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.preemption_notice import watch_notice
from farspan.runtime.stop_and_preemption import Launcher, StopRequests
from farspan.runtime.training.events import EventLog, newest_step
from farspan.runtime.training.sample_order import (
    MixedWindows,
    PackedWindows,
    ReshuffledWindows,
    Windows,
)
from farspan.runtime.training.trainer import Trainer
from farspan.runtime.training.worker_parts import Worker
from farspan.semantics.compile_choice import runs_compiled

#: Tokens of sample text that a finished run writes, and of the prompt before it.
SAMPLE_TOKENS = 80
PROMPT_TOKENS = 8


def build(plan: Plan, run: RunFolder, group: Group, emit: Callable[[Event], None]) -> Worker:
    """Build the model on its device, its flat state, and the token files."""
    if others := describe_others(group.device):
        emit(Warned(at=time.time(), message=others))
    manifest = load(run.corpus, CorpusManifest)
    if manifest.hash != plan.inputs.corpus:
        raise Refusal(
            "plan-mismatch",
            what="the corpus is not the one that was planned for",
            where=run.corpus,
            fact=f"planned for {plan.inputs.corpus}, found {manifest.hash}",
            remedy="farspan train run.yaml",
        )
    record = load(run.record, RunRecord)
    folder = find_prepared.require_corpus(run, manifest.hash)
    remedy = find_prepared.mending_command(run, folder)
    training, held_out = (TokenFile.open(folder, split, manifest, remedy) for split in SPLITS)
    train = train_windows(training, plan.train, manifest)
    val = val_windows(held_out, plan.train, manifest)
    executor = Executor(Topology(plan, group.rank), group.device)
    check_tokens(group, train, val)
    is_continued = record.initial is not None
    worker = Worker(plan, run, group, executor, manifest, train, val, emit, time.time, is_continued)
    if group.rank == 0:
        worker.prompts = prompts(held_out)
    # The initial weights: drawn by each worker for itself, or read by rank 0 and sent.
    if record.initial is None:
        executor.load_parameters(initial_parameters(plan.model, plan.train.seed))
    else:
        weights = None
        if group.rank == 0:
            folder = Path(record.initial).expanduser()
            if plan.model.lora:
                require_weights(folder, record.initial_weights)
            _, weights = huggingface.read_model(folder)
        if plan.model.lora:
            executor.whole.hand_out_frozen(weights)
            executor.load_parameters(initial_adapters(plan.model, plan.train.seed))
        else:
            executor.whole.hand_out(executor.state.master, weights)
            executor.begin_run()
    dtype = executor.state.dtype
    warnings_ = [select_kernels(executor.model, group.device, dtype)]
    if runs_compiled(plan, group.rank):
        inputs = block_inputs(executor.topology)
        warnings_.append(compile_or_restore(executor.model, group.device, dtype, inputs))
    for message in filter(None, warnings_):
        emit(Warned(at=time.time(), message=message))
    return worker


def train_windows(file: TokenFile, train: TrainSpec, manifest: CorpusManifest) -> Windows:
    """Return the windows that a training reads of its split; of a mixture those of each source."""
    reshuffle = train.regular.reshuffle
    if not manifest.parts:
        if not reshuffle:
            return PackedWindows(file.tokens, train.seq_len)
        return ReshuffledWindows(
            file.tokens, train.seq_len, offsets=file.offsets[:], seed=train.seed
        )
    parts = []
    first = 0
    first_document = 0
    for part in manifest.parts:
        size = part.train.tokens
        after = first_document + part.train.documents
        windows = PackedWindows(file.tokens, train.seq_len, first, size)
        if reshuffle:
            offsets = file.offsets[first_document : after + 1]
            windows = ReshuffledWindows(
                file.tokens, train.seq_len, first, size, offsets=offsets, seed=train.seed
            )
        parts.append(windows)
        first += size
        first_document = after
    return MixedWindows(tuple(parts))


def val_windows(file: TokenFile, train: TrainSpec, manifest: CorpusManifest) -> Windows:
    """Return the windows of the validation split; of a mixture those of each source."""
    if not manifest.parts:
        return PackedWindows(file.tokens, train.seq_len)
    parts = []
    first = 0
    for part in manifest.parts:
        parts.append(PackedWindows(file.tokens, train.seq_len, first, part.val.tokens))
        first += part.val.tokens
    return MixedWindows(tuple(parts))


def prompts(held_out: TokenFile) -> tuple[list[int], ...]:
    """Return the first tokens of two documents of the validation split, for the sample at the end:
    the corpus may be gone by then."""
    middle = (len(held_out.offsets) - 1) // 2
    return tuple(held_out.document(i)[:PROMPT_TOKENS].tolist() for i in (0, middle))


def check_tokens(group: Group, *files: Windows) -> None:
    """Refuse workers on hosts with other tokens under the corpus's name."""
    if group.world == 1:
        return
    own = sum(split_fingerprint(windows.tokens) for windows in files)
    expected, *others = group.all_gather(own)
    for rank, value in enumerate(others, 1):
        if value == expected:
            continue
        raise Refusal(
            "plan-mismatch",
            what="the workers have unlike tokens",
            where=f"rank {rank}",
            fact="its corpus has the same manifest as rank 0's, and other bytes",
            remedy="remove that host's copy of the corpus; it is sent again",
        )


def block_inputs(topology: Topology) -> BlockInputs:
    """Return the rows, positions and dropout of a worker's blocks in training."""
    train = topology.plan.train
    replica = topology.replica
    rows = []
    for i in range(replica.microbatches):
        count = replica.microbatch_rows(topology.stage_index, topology.batch, i)
        rows.append(max(1, count))  # A worker without a sequence reads one.
    return BlockInputs(tuple(dict.fromkeys(rows)), train.seq_len, train.regular.dropout)


def train(
    plan: Plan,
    run: RunFolder,
    rank: int,
    world: int,
    notices: Notices | None,
    launcher: Launcher,
    epoch: Epoch,
) -> None:
    """Train from the newest checkpoint to the end. How it ends is the last event.

    Raises Refusal, on all workers, where any of them was preempted (preempted).
    """
    began = time.monotonic()
    device = open_device(plan.devices[rank], plan.train.precision)
    events = run.events
    if rank != 0:
        events = run.logs / f"rank-{rank}.events.jsonl"
    trainer: Trainer | None = None
    preemption: Problem | None = None
    with ExitStack() as stack:
        log = stack.enter_context(EventLog(events, lambda: require_own(run, epoch)))

        def finish(reason: str, problem: Problem | None = None) -> None:
            if trainer is None:  # What has not started has no end.
                return
            finished = Finished(
                at=time.time(),
                step=trainer.state.step,
                reason=reason,
                seconds=time.monotonic() - began,
                problem=problem,
            )
            log.write(finished)

        def lost(peer: int, how: How) -> None:
            problem = lost_worker_problem(peer, how, plan, run)
            with suppress(OSError, Refusal):
                finish("failed", problem)
            write_problem_file(problem, run, rank, epoch)
            # Nothing gentler: the main thread may be in a call that waits for the lost worker.
            os._exit(problem.exit_code)

        group = stack.enter_context(Group(rank, world, device, notices, lost))
        group.publish_connections()
        try:
            trainer = start_trainer(plan, run, group, log.write, launcher, began, epoch)
            group.keep_state = lambda peer: keep_last_step(trainer, peer, run, epoch)
            reason = trainer.run()
            if reason not in STOP_REASONS:
                weights = trainer.checkpointer.weights()
                if rank == 0:
                    sample(trainer, weights)
        except BaseException as error:
            if (lost_peer := group.lost_by(error)) is not None:
                with suppress(OSError):  # The log lies on the disk that may be full.
                    traceback.print_exception(error)
                    sys.stderr.flush()
                group.end_after_loss(*lost_peer)
            group.announce_exit()
            problem = as_problem(error, plan, run, rank)
            finish("failed", problem)
            raise Refusal.of(problem) from error
        if trainer.preempted:
            hosts = {peer: plan.devices[peer].host for peer in trainer.preempted}
            fact = (
                f"a signal from outside the run asked it to end; step {trainer.state.step} is "
                "saved, so no step is lost"
            )
            leaving = tuple(dict.fromkeys(hosts[peer] for peer in trainer.leaving))
            preemption = preemption_problem(
                hosts, where=run.path, fact=fact, remedy=run.resume_command(), leaving=leaving
            )
        finish(reason, preemption)
    # All have parted from each other, and what they had is saved.
    if preemption is not None:
        raise Refusal.of(preemption)


def keep_last_step(trainer: Trainer, lost: int, run: RunFolder, epoch: Epoch) -> None:
    """Have the next start begin at the last whole step, where the survivors of a lost worker hold
    its state: the one that commits it reports the step and the checkpoint. An error goes to the
    log: the next start begins at the newest checkpoint then."""

    def report(step: Step, saved: Saved) -> None:
        # Rank 0 may be the one that is lost, before it could report the step.
        with EventLog(run.events, lambda: require_own(run, epoch)) as log:
            if newest_step(run.events) < step.step:
                log.write(step)
            log.write(saved)

    try:
        trainer.write_last_step(lost, report)
    except Exception:
        with suppress(OSError):
            traceback.print_exc()


def require_own(run: RunFolder, epoch: Epoch) -> None:
    """Check that this worker has a run to write to. Raises Refusal if its folder is gone
    (path-missing), or another has taken its place (superseded)."""
    run.require_there()
    epochs.fence_stale_epoch(run.epochs, epoch.number)


def start_trainer(
    plan: Plan,
    run: RunFolder,
    group: Group,
    emit: Callable[[Event], None],
    launcher: Launcher,
    began: float,
    epoch: Epoch,
) -> Trainer:
    """Build a trainer and restore the newest checkpoint; its start is the first event. A
    time budget counts from `began`, of the monotonic clock."""
    if group.rank == 0:  # The others write none.
        files = [file for file in run.checkpoints.rglob("*") if file.is_file()]
        stored = sum(file.stat().st_size for file in files)
        needed = (plan.train.keep + 2) * checkpoint_folder.bytes_needed(plan)
        checkpoint_folder.check_disk(run.path, needed - stored)
    worker = build(plan, run, group, emit)
    requests = StopRequests(launcher)
    worker.stop = requests.asked
    worker.preempted = requests.preempted
    worker.noticed = requests.noticed
    worker.host_leaves = lambda: requests.noticed() or is_host_leaving()
    worker.epoch = epoch
    trainer = Trainer(worker, began=began)
    trainer.restore()
    group.publish_connections()
    machine = environment(group.device)
    estimate = load(run.estimate, Estimate) if run.estimate.exists() else None
    peak_flops = catalog.peak_flops(machine.device, plan.train.precision, group.world)
    started = Started(
        at=time.time(),
        step=trainer.state.step,
        plan=plan.hash,
        world=group.world,
        environment=machine,
        used_s=trainer.elapsed_s,
        estimate=estimate,
        peak_flops=peak_flops,
    )
    emit(started)
    if (fault := epoch.fault) is not None:
        now = time.time()
        step = trainer.state.step
        recovered = Recovered(
            at=now,
            step=step,
            epoch=epoch.number,
            fault=fault.problem,
            replanned=fault.replanned,
            lost=max(0, fault.step - step),
            down_s=max(0.0, now - fault.at),
        )
        emit(recovered)
    apply_lab_limits()
    return trainer


def sample(trainer: Trainer, weights: dict[str, torch.Tensor]) -> None:
    """Continue the first words of two validation documents with the trained model, for the
    report; as far as the time budget goes."""
    worker = trainer.worker
    if trainer.budget.late:
        return
    spec = worker.plan.model
    if spec.lora:
        frozen = {name: value.cpu() for name, value in worker.state.frozen.items()}
        weights = merge_adapters(spec, frozen, weights)
    model = Decoder(spec.base)
    model.load_state_dict(weights)
    try:
        model.to(worker.group.device)
    except torch.OutOfMemoryError:
        # A model that only many devices hold: a few words more must not end its run as failed.
        model.to("cpu")
    tokenizer = tokenizers.load_tokenizer(worker.run.tokenizer)
    for beginning in worker.prompts:
        prompt = tokenizer.decode(beginning)
        text = generate(
            model,
            tokenizer,
            prompt,
            tokens=SAMPLE_TOKENS,
            temperature=0.8,
            top_k=50,
            seed=0,
            enough=lambda: trainer.budget.late,
        )
        if not text:
            continue
        verbatim = None
        if not trainer.budget.late:
            verbatim = known_share(worker, tokenizer.encode(text))
        step = trainer.state.step
        worker.emit(Sampled(at=time.time(), step=step, prompt=prompt, text=text, verbatim=verbatim))


def known_share(worker: Worker, written: list[int]) -> float | None:
    """Return the share of written tokens that stand in the training text; None if that is damaged.

    All of the text is read, also blocks that no step has read. The training is complete: damage
    there is warned of.
    """
    try:
        return verbatim_share(np.array(written), worker.train.tokens)
    except Refusal as damage:
        problem = damage.problem
        message = f"{problem.what}: {problem.where}: {problem.fact}; {problem.remedy}"
        worker.emit(Warned(at=time.time(), message=message))
        return None


def as_problem(error: BaseException, plan: Plan | None, run: RunFolder, rank: int) -> Problem:
    """Describe a worker's exception to the user; `plan` is None before it is loaded."""
    if isinstance(error, Refusal):
        return error.problem
    message = " ".join(str(error).split())
    if plan and memory_is_full(error):
        device = plan.devices[rank]
        predicted = "nothing"
        if run.estimate.exists():
            predicted = format_bytes(load(run.estimate, Estimate).memory[rank].total)
        return Problem(
            code="out-of-memory",
            what="a worker ran out of memory",
            where=f"rank {rank} ({device.backend} on {device.host})",
            fact=f"predicted {predicted}; {message[:200]}",
            remedy=f"lower train.batch.global (now {plan.train.batch:d} sequences of "
            f"{plan.train.seq_len:d}) or set "
            "train.recompute: true in run.yaml",
            rank=rank,
            host=device.host,
        )
    if isinstance(error, Corrupt):
        return Problem(
            code="checkpoint-corrupt",
            what="a checkpoint changed while it was read",
            where=str(run.checkpoints),
            fact=message[:300],
            remedy=run.resume_command(),
        )
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    full = full or "No space left" in message or "Disk quota exceeded" in message
    if full and "/dev/shm" not in message:  # Which is memory that NCCL's processes share.
        return Problem(
            code="disk-full",
            what="the disk became full while training",
            where=str(run.path),
            fact=message[:300],
            remedy=f"free some space there, then: {run.resume_command()}",
        )
    host = plan.devices[rank].host if plan else platform.node()
    # gloo raises RuntimeError, whose message alone says so; a store and NCCL have errors of their
    # own.
    exchange_errors = torch.distributed.DistError, ConnectionError, TimeoutError
    exchange = isinstance(error, exchange_errors) or "gloo" in message
    return Problem(
        code="worker-lost",
        what=f"rank {rank} on {host} failed",
        where=f"{type(error).__name__} in {run.logs}/rank-{rank}.log",
        fact=message[:300] or "no message",
        remedy=run.resume_command(),
        cause="exchange" if exchange else "own",
        rank=rank,
        host=host,
    )


def lost_worker_problem(peer: int, how: How, plan: Plan, run: RunFolder) -> Problem:
    """Describe to the user that another worker is lost."""
    host = plan.devices[peer].host
    facts: dict[How, str] = {
        "silence": (
            f"it has said nothing for {SILENCE_S:.0f} s: the machine, the network or the process "
            "stands still"
        ),
        "connection": "a connection to it broke: it has ended, or the network between is cut",
        "stall": "its step does not end: an exchange with others hangs, though all of them live",
    }
    return Problem(
        code="worker-lost",
        what=f"rank {peer} on {host} was lost",
        where=f"{run.logs}/rank-{peer}.log",
        remedy=run.resume_command(),
        rank=peer,
        host=host,
        fact=facts[how],
    )


def check_plan(plan: Plan, run: RunFolder, rank: int, world: int) -> None:
    """Refuse a plan that is of another number of workers, or that cannot be: its file may have been
    edited."""
    if world != len(plan.devices):
        raise Refusal(
            "plan-mismatch",
            what=f"the plan is for {counted(len(plan.devices), 'worker')}, not {world}",
            where=f"rank {rank}",
            fact=f"{world} were started",
            remedy=run.resume_command(),
        )
    if wrong := find_flaw(plan):
        raise Refusal(
            "plan-mismatch",
            what="the plan does not hold together",
            where=run.plan,
            fact=wrong,
            remedy="train anew: farspan train run.yaml",
        )


def check_version(notices: Notices, run: RunFolder, rank: int) -> None:
    """Refuse to work with a rank 0 of another version: what they send each other may differ."""
    ours = f"farspan {__version__}, torch {torch.__version__.split('+')[0]}"
    if rank == 0:
        notices.send_to_all("farspan/version", ours)
        return
    (answer,) = notices.wait(["farspan/version"], WORKER_START_S)
    theirs = answer.decode()
    if theirs != ours:
        raise Refusal(
            "version-mismatch",
            what="the workers are of unlike versions",
            where=f"rank {rank} on {platform.node()}",
            fact=f"here {ours}; rank 0 has {theirs}",
            remedy=run.doctor_command(),
        )


def write_problem_file(
    problem: Problem, run: RunFolder, rank: int, epoch: Epoch | None = None
) -> None:
    """Write what ends this worker for its launcher; if the disk is full only the exit code reports
    it. One that was replaced writes nothing."""
    if epoch is not None:
        newest = epochs.readable_ledger(run.epochs).epoch
        if newest > epoch.number:
            return
    with suppress(OSError):
        save(problem, run.logs / f"rank-{rank}.problem.json")


def leave_group(run: RunFolder, rank: int) -> None:
    """Make the folder of logs, and record there for the launcher which control group counts this
    worker if the kernel kills it."""
    with suppress(OSError):  # The disk may be full.
        # A host with a disk of its own may not have the folder yet.
        run.logs.mkdir(parents=True, exist_ok=True)
        if (group := own_cgroup()) is not None:
            save(group, run.logs / f"rank-{rank}.group.json")


def main() -> int:
    # PyTorch 2.13 gives collectives names that 2.11 lacks; the last words of a log are for what
    # went wrong.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    keep_compiled_code()
    run = RunFolder(Path(sys.argv[2]).expanduser())
    plan = None
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    launcher = Launcher()
    epoch = epochs.read_own_epoch(os.environ)
    if epoch is None:
        epoch = Epoch(number=epochs.readable_ledger(run.epochs).epoch)
    leave_group(run, rank)
    epochs.hold_claim()
    watch_notice(os.environ.get(NOTICE_VARIABLE))
    try:
        notices = connect_workers(rank, world, run_secret(world))
        if notices is not None:
            check_version(notices, run, rank)
            share_files(notices, rank, world, run)
        given = load(Path(sys.argv[1]).expanduser(), Plan)
        check_plan(given, run, rank, world)
        plan = given
        train(plan, run, rank, world, notices, launcher, epoch)
        return 0
    except Exception as error:
        problem = as_problem(error, plan, run, rank)
        write_problem_file(problem, run, rank, epoch)
        with suppress(OSError):  # The log lies on the disk that may be full.
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        # Not by returning: the interpreter would first wait for threads that may wait for a lost
        # worker, and it aborts where one of gloo's still holds the tensors of an exchange that
        # failed.
        os._exit(problem.exit_code)


if __name__ == "__main__":
    raise SystemExit(main())
