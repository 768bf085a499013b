"""Checks of a GPU's arithmetic and of a whole run on it, without pytest.

benchmarks/gpu.py runs them on machines that lack pytest, test_gpu.py where it is installed. Each
returns what it measured.
"""

from __future__ import annotations

import copy
import math
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from farspan.domain.model import ModelSpec
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Started, Step, Validated, read_events
from farspan.domain.train import Muon, Optimizer, Precision, Regularization, TrainSpec
from farspan.runtime.comm.topology import Topology
from farspan.runtime.model.compiled_blocks import compile_blocks
from farspan.runtime.model.decoder import Decoder, initial_parameters, load_whole
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.parallel.device_step import StepLayout
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.state.train_state import update_scalars
from farspan.runtime.training.prefetch import ReadStep
from farspan.runtime.training.recorded_steps import RecordedSteps
from tests import tiny
from tests.waiting import LIMIT_S, wait_for

#: Largest relative error of a gradient: rounding of each format, through a few layers.
GRADIENT_BOUNDS: dict[Precision, float] = {"fp32": 1e-4, "bf16": 5e-2}
#: Largest relative difference of losses and of the weights' movement after three steps in fp32.
LOSS_BOUND = 1e-4
MOVEMENT_BOUND = 1e-2
#: Largest relative difference of a recorded step's loss: rounding, should its bits be others.
CURVE_BOUND = 1e-2
OPTIMIZERS = {"adamw": Optimizer(), "muon": Optimizer(muon=Muon(embedding=3.0))}
ROWS = 4
LENGTH = 64
SPEC: ModelSpec = replace(tiny.SPEC, context=LENGTH)
#: Source files that the whole run learns from: the same text on every machine.
SOURCES = Path(__file__).parents[2] / "farspan"


@dataclass(frozen=True)
class WholeRun:
    """What check_whole_run trains, and how far below a uniform guess its loss must end, in nats."""

    steps: int = 600
    size: str = "tiny"
    vocabulary: int = 2048
    sources: str = "**/*.py"
    learned: float = 1.0


#: To try the commands on a CPU.
QUICK_RUN = WholeRun(steps=12, size="300k", vocabulary=512, sources="runtime/**/*.py", learned=0)


def plan(train: TrainSpec, backend: str, microbatches: int) -> Plan:
    stage = Stage(
        units=(0, SPEC.layers + 2),
        mesh=Mesh(ranks=(0,), shape=(1,), axes=("data",)),
        rows=(ROWS,),
        grad_sync=GradSync(bucket_bytes=20_000),
    )
    return Plan(
        technique="data",
        model=SPEC,
        train=train,
        replicas=(Replica(stages=(stage,), microbatches=microbatches),),
        inputs=Inputs(cluster="", corpus=""),
        devices=(PlannedDevice(host="h", backend=backend, index=0, threads=1),),
    )


def tokens() -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(SPEC.vocab_size, (ROWS, LENGTH + 1), generator=random)


def check_gradients(device: torch.device, precision: Precision, compiled: bool) -> dict[str, float]:
    """Compare the loss and each gradient of two microbatches with one process in float64."""
    train = TrainSpec(steps=1, batch=ROWS, seq_len=LENGTH, precision=precision, seed=1)
    executor = Executor(Topology(plan(train, device.type, microbatches=2), 0), device)
    executor.load_parameters(initial_parameters(SPEC, 1))
    if compiled:
        compile_blocks(executor.model, device)
    whole = tokens()

    def read(i: int) -> Batch:
        part = whole[2 * i : 2 * i + 2].to(device)
        return Batch(part[:, :-1], part[:, 1:])

    outcome = executor.compute_gradients(whole.numpy(), read, 1 / (ROWS * LENGTH))
    reference = Decoder(SPEC, attention="vanilla")
    for name, value in initial_parameters(SPEC, 1):
        load_whole(reference, name, value)
    reference = copy.deepcopy(reference).double()
    logits = reference(whole[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten())
    loss.backward()
    loss_error = abs(outcome.loss / (ROWS * LENGTH) - float(loss)) / float(loss)
    exact = {name: parameter.grad for name, parameter in reference.named_parameters()}
    norm = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in exact.values()))
    errors = {}
    for i, name in enumerate(executor.state.names):
        gradient = executor.state.view_parameter(executor.state.grad, i).double().cpu()
        # One that is almost zero is judged by the norm of all.
        errors[name] = float((gradient - exact[name]).norm()) / (
            float(exact[name].norm()) + 1e-2 * norm
        )
    worst = max(errors, key=errors.__getitem__)
    bound = GRADIENT_BOUNDS[precision]
    assert loss_error <= bound / 10, f"the loss differs by {loss_error:.2e}"
    assert errors[worst] <= bound, f"the gradient of {worst} differs by {errors[worst]:.2e}"
    return {"loss_error": loss_error, "gradient_error": errors[worst], "bound": bound}


def check_updates(device: torch.device, optimizer: Optimizer) -> dict[str, float]:
    """Compare three steps in fp32 with dropout with those of a CPU."""
    train = TrainSpec(
        steps=3,
        batch=ROWS,
        seq_len=LENGTH,
        precision="fp32",
        optimizer=optimizer,
        regularization=Regularization(dropout=0.1),
    )
    on_cpu, losses_on_cpu = weights_after_steps(torch.device("cpu"), train)
    on_device, losses = weights_after_steps(device, train)
    first = Executor(Topology(plan(train, "cpu", microbatches=1), 0), torch.device("cpu"))
    first.load_parameters(initial_parameters(SPEC, 1))
    moved = on_cpu - torch.cat([master.clone() for master in first.state.master])
    loss_error = max(abs(a - b) / b for a, b in zip(losses, losses_on_cpu, strict=True))
    movement_error = float((on_device - on_cpu).norm()) / float(moved.norm())
    assert loss_error <= LOSS_BOUND, f"a loss differs by {loss_error:.2e}"
    assert movement_error < MOVEMENT_BOUND, f"the weights moved otherwise by {movement_error:.2e}"
    return {"loss_error": loss_error, "movement_error": movement_error}


def weights_after_steps(device: torch.device, train: TrainSpec) -> tuple[torch.Tensor, list[float]]:
    """The master weights after the steps of `train`, and the summed loss of each step."""
    executor = Executor(Topology(plan(train, device.type, microbatches=1), 0), device)
    executor.load_parameters(initial_parameters(SPEC, 1))
    whole = tokens()
    dropout = Dropout(0.1, torch.arange(ROWS, dtype=torch.int32, device=device))
    batch = Batch(whole[:, :-1].to(device), whole[:, 1:].to(device), dropout)
    losses = []
    for step in range(1, train.steps + 1):
        outcome = executor.compute_gradients(whole.numpy(), lambda i: batch, 1 / (ROWS * LENGTH))
        losses.append(outcome.loss)
        executor.optimizer_step(train.optimizer, 1e-3, step, max(1.0, outcome.norm))
    return torch.cat([master.cpu() for master in executor.state.master]), losses


def check_repeated_gradients(device: torch.device) -> dict[str, float]:
    """Compute the gradients of one step twice, over as many tokens as the embedding's kernel takes
    at once: they have the same bits."""
    rows = 2048 // LENGTH
    train = TrainSpec(steps=1, batch=rows, seq_len=LENGTH, precision="fp32")
    executor = Executor(Topology(one_device(train, device.type), 0), device)
    executor.load_parameters(initial_parameters(SPEC, 1))
    random = torch.Generator().manual_seed(0)
    whole = torch.randint(SPEC.vocab_size, (rows, LENGTH + 1), generator=random)
    batch = Batch(whole[:, :-1].to(device), whole[:, 1:].to(device))
    found = []
    for _ in range(20):
        executor.compute_gradients(whole.numpy(), lambda i: batch, 1 / (rows * LENGTH))
        found.append(torch.cat([grad.cpu().clone() for grad in executor.state.grad]))
        executor.state.clear_gradients()
    differing = sum(not torch.equal(found[0], other) for other in found[1:])
    assert not differing, f"{differing} of 19 repeated gradients have other bits"
    return {"repeats": len(found)}


def check_recorded_steps(
    device: torch.device, optimizer: Optimizer, steps: int = 200
) -> dict[str, float]:
    """Compare the losses of recorded steps with those of the same steps one by one."""
    rows = 8
    train = TrainSpec(
        steps=steps, batch=rows, seq_len=LENGTH, precision="bf16", optimizer=optimizer
    )
    random = torch.Generator().manual_seed(0)
    # A few batches, which are learned.
    batches = torch.randint(SPEC.vocab_size, (4, rows, LENGTH + 1), generator=random)
    losses = {False: list[float](), True: list[float]()}
    recorded = False
    scale = 1 / (rows * LENGTH)
    layout = StepLayout((rows,), LENGTH)
    for records, found in losses.items():
        executor = Executor(Topology(one_device(train, device.type), 0), device)
        executor.load_parameters(initial_parameters(SPEC, 1))
        made = RecordedSteps(executor, train, layout, warn=print)
        for step in range(steps):
            tokens_BS = batches[step % len(batches)]
            if not records:
                batch = Batch(tokens_BS[:, :-1].to(device), tokens_BS[:, 1:].to(device))
                outcome = executor.compute_gradients(
                    tokens_BS.numpy(), lambda i, batch=batch: batch, scale
                )
                found.append(outcome.loss * scale)
                executor.optimizer_step(optimizer, 1e-3, step + 1, max(1.0, outcome.norm))
                continue
            inputs = torch.zeros(layout.size, dtype=torch.int32)
            layout.tokens(inputs, 0)[0] = tokens_BS[:, :-1]
            layout.tokens(inputs, 0)[1] = tokens_BS[:, 1:]
            read = ReadStep(rows * LENGTH, rows * LENGTH, tokens_BS.numpy(), inputs)
            made.launch(step, read, update_scalars(optimizer, 1e-3, step + 1), scale)
            found += [result.loss for result in made.take_results(unread=1)]
        found += [result.loss for result in made.take_results(unread=0)]
        recorded = made.recorded
    largest = max(abs(a - b) / a for a, b in zip(losses[False], losses[True], strict=True))
    assert len(losses[True]) == steps and recorded == (device.type == "cuda")
    assert largest <= CURVE_BOUND, f"a loss differs by {largest:.2e}"
    return {"same_bits": losses[False] == losses[True], "loss_error": largest}


def one_device(train: TrainSpec, backend: str) -> Plan:
    """Return the plan of one device and one microbatch."""
    made = plan(train, backend, microbatches=1)
    (replica,) = made.replicas
    (stage,) = replica.stages
    whole = replace(replica, stages=(replace(stage, rows=(train.batch,)),))
    return replace(made, replicas=(whole,))


def check_whole_run(folder: Path, backend: str, whole: WholeRun) -> dict[str, float]:
    """Train by the command line, stop, resume, embed and search."""
    text = folder / "text"
    text.mkdir()
    for path in SOURCES.glob(whole.sources):
        name = "-".join(path.relative_to(SOURCES).with_suffix(".txt").parts)
        (text / name).write_bytes(path.read_bytes())
    # A run that ends before the signal arrives is repeated with more steps.
    for steps in (whole.steps, 4 * whole.steps, 16 * whole.steps):
        run = RunFolder(folder / f"run-{steps}")
        config = (
            f"data: {text}\nsize: {whole.size}\ntokenizer: {{vocab: {whole.vocabulary}}}\n"
            f"train: {{steps: {steps}, batch: {{global: 8 sequences}}}}\n"
            f"parallel: {{device: {backend}}}\n"
        )
        train_until(run, folder, config, steps // 4)
        stopped = last_step(run)
        if stopped < steps:
            break
    assert stopped < steps, f"it was not stopped: {stopped} of {steps} steps"
    assert run.load_plan().devices[0].backend == backend
    farspan("resume", str(run.path))
    events = list(read_events(run.events))
    starts = [event.step for event in events if isinstance(event, Started)]
    assert starts[0] == 0 and 0 < starts[1] <= stopped, f"it started at steps {starts}"
    assert [event.reason for event in events if isinstance(event, Finished)][-1] == "done"
    loss = [event.loss for event in events if isinstance(event, Validated)][-1]
    assert loss < math.log(whole.vocabulary) - whole.learned, f"validation loss {loss:.2f}"
    farspan("embed", str(run.path))
    printed = farspan("search", "--run", str(run.path), "write a checkpoint")
    assert "checkpoint" in printed.lower(), printed
    step_s = sorted(event.step_s for event in events if isinstance(event, Step))
    return {"steps": steps, "stopped": stopped, "loss": loss, "step_s": step_s[len(step_s) // 2]}


def train_until(run: RunFolder, folder: Path, config: str, step: int) -> None:
    """Start `farspan train`, and interrupt it once it has made a number of steps."""
    (folder / "run.yaml").write_text(config)
    log = folder / "train.log"
    command = [sys.executable, "-m", "farspan", "train", str(folder / "run.yaml")]
    with open(log, "w") as file:
        training = subprocess.Popen([*command, "--run", str(run.path)], stdout=file, stderr=file)
    try:
        wait_for(lambda: last_step(run) >= step, f"{step} steps: see {log}", training)
        training.send_signal(signal.SIGINT)
        training.wait(LIMIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()}") from error
    finally:
        training.kill()


def farspan(*words: str) -> str:
    """Run a command that must succeed; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "farspan", *words], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"farspan {words[0]}: {done.stderr or done.stdout}"
    return done.stdout


def last_step(run: RunFolder) -> int:
    if not run.events.exists():
        return 0
    return max((e.step for e in read_events(run.events) if isinstance(e, Step)), default=0)
