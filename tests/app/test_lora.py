"""Runs that train adapters of a model: what is trained, kept, resumed, used and exported, on one
device and under data parallelism; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from farspan.app.model_use import generate_text
from farspan.cli.main import main
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Step, Validated, read_events
from farspan.domain.struct_files import load
from farspan.planning.recipe import CONTINUED_RATE, LORA_RATE, peak_rate
from farspan.techniques import technique_names
from tests.faults.running import write_text

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from farspan.runtime import inference  # noqa: E402
from farspan.runtime.checkpoint import checkpoint_folder  # noqa: E402
from tests.app.small_models import write_model  # noqa: E402

SEQ_LEN = 32
STEPS = 8
SETTINGS = (
    "train.lora=4",
    f"train.steps={STEPS}",
    "train.batch.global=4 sequences",
    "train.precision=fp32",
    "train.validate_every=4",
    "checkpoint.every=1ms",
    "checkpoint.keep=20",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapting") / "text"
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, text) -> Path:
    """A small Llama as transformers saves it, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=320,
        max_position_embeddings=SEQ_LEN,
    )
    return write_model(folder, config, text)


def command(folder: Path, text: Path, model: Path | None, *settings: str) -> list[str]:
    config = folder / "run.yaml"
    config.write_text(f"data: {{source: '{text}', val: 20%}}\nparallel: {{technique: data}}\n")
    words = [str(config)]
    if model is not None:
        words += ["--from", str(model)]
    for setting in settings:
        words += ["--set", setting]
    return words


def train(folder: Path, text: Path, model: Path, *settings: str, workers: int = 1) -> RunFolder:
    folder.mkdir(exist_ok=True)
    run = folder / "run"
    words = command(folder, text, model, *SETTINGS, f"parallel.workers={workers}", *settings)
    assert main(["train", *words, "--run", str(run)]) == 0
    return RunFolder(run)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text, model) -> RunFolder:
    return train(tmp_path_factory.mktemp("one"), text, model)


def losses(run: RunFolder) -> list[float]:
    return [event.loss for event in read_events(run.events) if isinstance(event, Step)]


def test_checkpoints_hold_adapters_alone_which_learn_at_ten_times_the_rate(trained, model):
    plan = load(trained.plan, Plan)
    assert plan.model.lora.rank == 4
    count = sum(value.numel() for value in load_file(model / "model.safetensors").values())
    optimizer = plan.train.optimizer
    rate = CONTINUED_RATE * LORA_RATE * peak_rate(count)
    assert optimizer.lr == pytest.approx(rate, rel=0.05) and not optimizer.muon

    first, *others = [
        event for event in read_events(trained.events) if isinstance(event, Validated)
    ]
    assert first.step == 0 and others[-1].loss < first.loss
    newest = next(checkpoint_folder.newest_first(trained.checkpoints))
    names = checkpoint_folder.read_checked_manifest(newest).tensors
    assert names and all(name.endswith((".lora_a", ".lora_b")) for name in names)


@torch.no_grad()
def test_exported_folders_compute_what_the_run_does(trained, model, tmp_path):
    peft = pytest.importorskip("peft")
    own = inference.load(trained)
    tokens = torch.randint(300, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    logits = own.model(tokens)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert (base(tokens).logits - logits).abs().max() > 1e-3

    assert main(["export", str(trained.path), "--out", str(tmp_path / "merged")]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (merged(tokens).logits - logits).abs().max() < 1e-5
    # What has no adapter keeps every bit.
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "_proj" not in name}

    assert main(["export", str(trained.path), "--format", "peft"]) == 0
    adapted = peft.PeftModel.from_pretrained(base, trained.path / "adapters")
    assert (adapted(tokens).logits - logits).abs().max() < 1e-5
    by_path = peft.AutoPeftModelForCausalLM.from_pretrained(trained.path / "adapters")
    assert (by_path(tokens).logits - logits).abs().max() < 1e-5
    card = (trained.path / "adapters" / "README.md").read_text()
    assert "LoRA of rank 4" in card and str(model.parent) not in card


def test_text_is_generated_by_merged_weights(trained):
    text, step = generate_text(trained, "the", tokens=5, temperature=0.0, top_k=1, seed=0)
    assert text and step > 0


def test_two_data_parallel_workers_equal_one(trained, tmp_path, text, model):
    both = train(tmp_path / "two", text, model, "parallel.technique=data", workers=2)
    assert len(load(both.plan, Plan).devices) == 2
    assert losses(both) == pytest.approx(losses(trained), rel=1e-5)


def test_run_resumes_with_the_losses_of_one_that_was_not_stopped(trained, tmp_path):
    """From a checkpoint in the middle, with the records that a kill there leaves."""
    copy = tmp_path / "run"
    shutil.copytree(trained.path, copy)
    run = RunFolder(copy)
    saved = list(checkpoint_folder.newest_first(run.checkpoints))
    middle = checkpoint_folder.step_of(saved[len(saved) // 2])
    for path in saved[: len(saved) // 2]:
        shutil.rmtree(path)
    shutil.rmtree(run.best)
    lines = run.events.read_bytes().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if f"step-{middle:08d}".encode() in line)
    run.events.write_bytes(b"".join(lines[: cut + 1]))
    before = len(losses(run))
    assert main(["resume", str(copy)]) == 0
    resumed = losses(run)
    assert 0 < middle <= before < len(resumed)
    again = [event for event in read_events(run.events) if isinstance(event, Step)][before:]
    by_step = dict(enumerate(losses(trained), 1))
    assert [event.step for event in again] == list(range(middle + 1, STEPS + 1))
    assert all(event.loss == by_step[event.step] for event in again)


def test_model_that_was_replaced_is_refused(trained, model):
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-4] + b"\x00\x00\x00\x01")
        with pytest.raises(Refusal, match="other weights than before"):
            inference.load(trained)
    finally:
        weights.write_bytes(content)


def test_run_without_adapters_has_no_peft_folder(tmp_path, text, model, capsys):
    run = train(tmp_path / "full", text, model, "train.lora=null", "train.steps=1")
    assert main(["export", str(run.path), "--format", "peft"]) != 0
    assert "the run has no adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (["train.lora=33"], "the smallest dimension of the model's projections is 16"),
        (["train.lora=4", "train.optimizer=muon"], "Muon updates whole matrices"),
        (["train.lora=0"], "train.lora"),
    ],
)
def test_adapters_that_cannot_be_are_refused(tmp_path, text, model, capsys, settings, fact):
    assert main(["plan", *command(tmp_path, text, model, *settings)]) != 0
    assert fact in capsys.readouterr().err


def test_adapters_without_a_model_are_refused(tmp_path, text, capsys):
    assert main(["plan", *command(tmp_path, text, None, "train.lora=4")]) != 0
    assert "model.path names none" in capsys.readouterr().err


def test_other_techniques_are_refused_by_name(tmp_path, text, model, capsys):
    words = command(tmp_path, text, model, *SETTINGS, "parallel.workers=2")
    assert main(["plan", *words, "--set", "parallel.technique=auto", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    problems = {one["technique"]: one["problem"] for one in answer["candidates"] if one["problem"]}
    assert answer["candidates"][answer["chosen"]]["technique"] == "data"
    assert problems.keys() == set(technique_names()) - {"data"}
    for technique, problem in problems.items():
        assert problem["what"] == f"{technique} does not train adapters (LoRA)"

    words = command(tmp_path, text, model, *SETTINGS, "parallel.technique=zero2")
    assert main(["train", *words, "--run", str(tmp_path / "run")]) != 0
    assert "zero2 does not train adapters (LoRA)" in capsys.readouterr().err
