"""Runs that continue a model: what it was worth before, the rate it learns at, and the best
weights, which may be those it had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from farspan import models
from farspan.cli.main import main
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Validated, read_events
from farspan.domain.struct_files import load
from farspan.planning.recipe import CONTINUED_RATE, peak_rate
from farspan.report.history import open_run
from farspan.report.text import run_summary
from tests.faults.running import write_text

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from farspan.runtime.training.sample_order import PackedWindows, shuffle_index  # noqa: E402
from farspan.runtime.training.validation import SEED  # noqa: E402
from tests.app.small_models import write_model  # noqa: E402

SEQ_LEN = 32


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("continuing") / "text"
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, text) -> Path:
    """A small Qwen3 as transformers saves it, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=24,
        intermediate_size=64,
        vocab_size=320,
        max_position_embeddings=SEQ_LEN,
    )
    return write_model(folder, config, text)


def train(folder: Path, text: Path, model: Path, *settings: str) -> RunFolder:
    config = folder / "run.yaml"
    config.write_text(f"data: {{source: '{text}', val: 20%}}\nparallel: {{technique: data}}\n")
    words = ["train", str(config), "--from", str(model), "--run", str(folder / "run")]
    for setting in ("parallel.workers=1", "train.precision=fp32", *settings):
        words += ["--set", setting]
    assert main(words) == 0
    return RunFolder(folder / "run")


def validations(run: RunFolder) -> list[Validated]:
    return [event for event in read_events(run.events) if isinstance(event, Validated)]


def test_model_is_validated_before_its_first_step_and_learns_at_a_share(tmp_path, text, model):
    run = train(tmp_path, text, model, "train.steps=4", "train.batch.global=4 sequences")
    first, *others = validations(run)
    assert first.step == 0 and first.best and all(event.step > 0 for event in others)

    # The loss is what transformers' model has on the same tokens.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    record = json.loads(run.record.read_bytes())
    tokens = np.fromfile(Path(record["corpus"]) / "val.bin", "<u2").astype(np.int64)
    windows = PackedWindows(tokens, SEQ_LEN)
    order = shuffle_index(np.arange(windows.count, dtype=np.uint64), windows.count, SEED, 0)
    losses = []
    with torch.no_grad():
        for number in order[: first.tokens // SEQ_LEN].astype(int):
            start = number * SEQ_LEN
            window = torch.from_numpy(tokens[start : start + SEQ_LEN + 1])
            logits = theirs(window[None, :-1]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    targets = torch.cat(losses)
    assert len(targets) == first.tokens
    assert first.loss == pytest.approx(float(targets.mean()), abs=1e-4)

    plan = load(run.plan, Plan)
    optimizer = plan.train.optimizer
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    assert optimizer.lr == pytest.approx(CONTINUED_RATE * peak_rate(parameters), rel=0.05)
    assert not optimizer.muon
    summary = run_summary(open_run(run.path))
    assert "before training the model's validation loss was" in summary
    assert "before training" in (run.path / "report.html").read_text()


def test_model_without_tokenizer_is_refused_before_any_text_is_read(tmp_path, text, model, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    config = tmp_path / "run.yaml"
    config.write_text(f"data: '{text}'\n")
    assert main(["plan", str(config), "--from", str(folder)]) != 0
    said = capsys.readouterr()
    assert "tokenizer-unreadable" in said.err and "copy the model's tokenizer.json" in said.err
    assert "reading" not in said.out


def test_best_weights_are_those_of_the_model_where_training_made_it_worse(tmp_path, text, model):
    run = train(
        tmp_path,
        text,
        model,
        "train.steps=6",
        "train.batch.global=4 sequences",
        "train.optimizer.lr=1",
        "train.warmup=0",
    )
    assert [event.step for event in validations(run) if event.best] == [0]
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "nats higher" in run_summary(open_run(run.path))


def test_own_young_model_continues_at_the_rate_of_a_new_one(tmp_path, text, model):
    first = train(tmp_path, text, model, "train.steps=2", "train.batch.global=4 sequences")
    # The tokens of a model of others are not known, so neither are those of its descendants.
    assert main(["export", str(first.path), "--out", str(tmp_path / "other")]) == 0
    assert models.read_trained_tokens(tmp_path / "other") is None

    own = tmp_path / "own"
    own.mkdir()
    config = own / "run.yaml"
    config.write_text(
        f"data: {{source: '{text}', val: 20%}}\n"
        "tokenizer: {vocab: 300}\n"
        f"model: {{layers: 2, d_model: 32, heads: 2, context: {SEQ_LEN}}}\n"
        "train: {steps: 3, batch: {global: 4 sequences}, precision: fp32}\n"
        "parallel: {technique: data, workers: 1}\n"
    )
    assert main(["train", str(config), "--run", str(own / "run")]) == 0
    assert main(["export", str(own / "run"), "--out", str(own / "model")]) == 0
    step_tokens = load(own / "run" / "plan.json", Plan).train.tokens_per_step
    trained = models.read_trained_tokens(own / "model")
    assert trained in [step * step_tokens for step in (1, 2, 3)]

    (tmp_path / "second").mkdir()
    second = train(
        tmp_path / "second", text, own / "model", "train.steps=2", "train.batch.global=4 sequences"
    )
    plan = load(second.plan, Plan)
    optimizer = plan.train.optimizer
    muon = bool(optimizer.muon)
    assert optimizer.lr == pytest.approx(peak_rate(count_parameters(plan.model), muon=muon))
    assert main(["export", str(second.path), "--out", str(tmp_path / "again")]) == 0
    both = models.read_trained_tokens(tmp_path / "again")
    assert both is not None and trained <= both <= trained + 2 * step_tokens
