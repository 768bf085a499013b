"""run.yaml becomes specs that keep every limit, from any corpus and machine, or a Refusal that
names the key."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan import models
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest, Split
from farspan.domain.engine import load_engine
from farspan.domain.model import Lora, count_parameters
from farspan.domain.probe_requests import ProbeResult, Speed
from farspan.domain.problems import Refusal
from farspan.domain.train import TrainSpec
from farspan.estimate.memory import activation_slack
from farspan.planning.model_speed import calibrate_cluster, on_one_device
from farspan.planning.recipe import CONTINUED_RATE, peak_rate
from farspan.planning.resolve import resolve_config
from farspan.planning.size import auto_parameters, fitted_shape, shape_for

RATE = {"fp32": 1e11, "bf16": 3e11}


def corpus(train=2_000_000, val=100_000, vocab=8192):
    splits = {
        name: Split(tokens=n, documents=9, text_bytes=3 * n)
        for name, n in (("train", train), ("val", val))
    }
    return CorpusManifest(
        hash="c" * 16,
        source="~/papers",
        vocab_size=vocab,
        end_of_text=0,
        dtype="uint16",
        unigram_nats=6.0,
        bigram_nats=4.0,
        exact_duplicates=0,
        near_duplicates=0,
        **splits,
    )


def cluster(devices=1, **changes):
    device = Device(kind="cpu", backend="cpu", memory=10**10).but(
        **{"dtypes": ("fp32", "bf16")} | changes
    )
    host = Host(name="here", devices=(device,) * devices, cpus=2, memory=10**11)
    return Cluster(sites=(Site(name="home", hosts=(host,)),))


def measure(model, train):
    """A machine that computes 6 FLOPs a parameter and token at RATE, in every precision."""
    speeds = {}
    for precision, flops in RATE.items():
        tokens_per_s = flops / (6 * count_parameters(model))
        step_s = train.batch * train.seq_len / tokens_per_s
        speeds[precision] = Speed(step_s=step_s, tokens_per_s=tokens_per_s, memory_bytes=10**9)
    return ProbeResult(rows=train.batch, seq_len=train.seq_len, speeds=speeds)


def run(config, on=None, devices=None, matmul=1e12):
    asked = msgspec.convert({"data": "~/papers"} | config, RunConfig)
    return resolve_config(
        asked, on or corpus(), devices or cluster(), matmul_flops=lambda: matmul, measure=measure
    )


def refused(config, **where):
    with pytest.raises(Refusal) as caught:
        run(config, **where)
    return caught.value.problem


@given(
    st.sampled_from(models.families()),
    st.integers(1_000_000, 2_000_000_000),
    st.sampled_from([300, 8192, 32000]),
    st.booleans(),
)
def test_the_size_dial_comes_within_a_tenth(family, target, vocab, tied):
    target = max(target, 4 * 64 * vocab)
    spec = shape_for(family, target, vocab_size=vocab, context=256, knobs={"tied": tied})
    assert abs(count_parameters(spec) / target - 1) <= 0.1
    assert spec.head_dim == (32 if target < 10_000_000 else 64)
    assert spec.tied == tied


@pytest.mark.parametrize(
    ("name", "billions"), [("slm-500m", 0.5), ("slm-1b", 1.0), ("slm-2b", 2.0)]
)
def test_the_fit_gives_back_the_papers_models(name, billions):
    spec = models.preset(name).spec
    d_model, layers = fitted_shape(billions * 1e9)
    assert abs(d_model - spec.d_model) < 64 and abs(layers - spec.layers) < 1


def test_named_sizes_grow_and_knobs_are_kept():
    counts = [
        count_parameters(run({"size": size}, on=corpus(10**9, 10**7)).model)
        for size in ("tiny", "small", "medium", "large", "xl")
    ]
    assert counts == sorted(counts) and counts[0] < 4e6 and counts[-1] > 9e8
    assert abs(count_parameters(run({"size": "30M"}).model) / 30e6 - 1) < 0.1
    fixed = run(
        {"model": {"params": "30M", "layers": 4, "heads": 6, "kv_heads": 2, "tied": False}}
    ).model
    assert (fixed.layers, fixed.heads, fixed.kv_heads, fixed.tied) == (4, 6, 2, False)
    assert abs(count_parameters(fixed) / 30e6 - 1) < 0.1
    exact = run(
        {"model": {"family": "gpt2", "layers": 3, "d_model": 96, "heads": 4, "d_ff": 100}}
    ).model
    assert (exact.family, exact.layers, exact.d_model, exact.heads, exact.d_ff) == (
        "gpt2",
        3,
        96,
        4,
        100,
    )


def test_auto_takes_the_smaller_of_what_corpus_and_machine_pay_for():
    assert auto_parameters(2e9, 1e30) == 100_000_000  # 20 tokens a parameter
    assert auto_parameters(1e30, 6 * 1e8 * 20e8) == 100_000_000  # 6 N D with D = 20 N
    large = corpus(10**9, 10**7)
    slow, fast = (run({"budget": {"time": "1h"}}, on=large, matmul=rate) for rate in (1e12, 1e14))
    expected = math.sqrt(0.9 * 3600 * 0.3e12 / 120)
    assert abs(count_parameters(slow.model) / expected - 1) < 0.1
    assert abs(count_parameters(fast.model) / (10 * expected) - 1) < 0.1
    assert slow.origin["model.size"].startswith("corpus and machine")


def test_preset_takes_the_corpus_vocabulary_and_records_that_origin():
    found = run({"model": {"preset": "gpt2-medium", "context": 512}})
    assert (found.model.layers, found.model.d_model, found.model.vocab_size) == (24, 1024, 8192)
    assert found.model.context == found.train.seq_len == 512
    assert found.origin["model.vocab_size"].startswith("corpus")
    whole = run({"model": {"preset": "gpt2"}}, on=corpus(vocab=50257)).model
    assert whole == models.preset("gpt2").spec


def write_header(folder, spec):
    """Write a llama's folder whose tensors are all zero; return the weight file's content."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(models.family("llama").to_config(spec)))
    (folder / "tokenizer.json").write_text("{}")
    entries = {}
    end = 0
    for tensor in models.family("llama").tensors(spec):
        for name, rows in zip(tensor.theirs, tensor.rows, strict=True):
            columns = spec.d_ff if "down_proj" in name else spec.d_model
            shape = [rows] if "norm" in name else [rows, columns]
            size = 4 * math.prod(shape)
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
            end += size
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(end)
    (folder / "model.safetensors").write_bytes(content)
    return content


def test_a_hugging_face_folder_gives_its_shape(tmp_path):
    spec = models.family("llama").shape(d_model=64, layers=2, vocab_size=9000, context=128)
    content = write_header(tmp_path, spec)
    weights = tmp_path / "model.safetensors"
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.unlink()
    assert refused({"model": {"path": str(tmp_path)}}).code == "tokenizer-unreadable"
    tokenizer.write_text("{}")
    weights.unlink()
    assert refused({"model": {"path": str(tmp_path)}}).code == "path-missing"
    weights.write_bytes(content[:-1])
    assert "its end is missing, 1 byte" in refused({"model": {"path": str(tmp_path)}}).fact
    weights.write_bytes(content)
    found = run({"model": {"path": str(tmp_path), "context": 32}})
    assert found.model == spec and found.train.seq_len == 32
    assert found.train.optimizer.lr == pytest.approx(
        CONTINUED_RATE * peak_rate(count_parameters(spec)), rel=0.05
    )
    assert (
        refused({"model": {"path": str(tmp_path)}}, on=corpus(vocab=9001)).code
        == "tokenizer-mismatch"
    )
    assert refused({"model": {"path": str(tmp_path), "context": 129}}).code == "out-of-range"
    assert refused({"model": {"path": str(tmp_path), "layers": 3}}).code == "out-of-range"
    assert refused({"model": {"path": str(tmp_path / "none")}}).code == "path-missing"


@pytest.mark.parametrize(
    ("positions", "val", "window"),
    [(128, 10**5, 128), (1024, 10**5, 1024), (8192, 10**5, 1024), (131_072, 600, 512)],
)
def test_a_model_of_many_positions_continues_on_shorter_windows(tmp_path, positions, val, window):
    spec = models.family("llama").shape(d_model=64, layers=2, vocab_size=9000, context=positions)
    write_header(tmp_path, spec)
    text = corpus(val=val)
    found = run({"model": {"path": str(tmp_path)}}, on=text)
    assert found.train.seq_len == window and found.model.context == positions
    given = run({"model": {"path": str(tmp_path), "context": 100}}, on=text)
    assert given.train.seq_len == 100 and given.model.context == positions


def test_a_model_is_not_too_large_for_the_text_that_it_continues_on(tmp_path):
    spec = models.family("llama").shape(d_model=256, layers=8, vocab_size=9000, context=256)
    write_header(tmp_path, spec)
    few = corpus(train=50_000, val=1000)
    train = {"epochs": 1, "batch": {"global": 4}}
    assert not run({"model": {"path": str(tmp_path)}, "train": train}, on=few).warnings
    shape = {"layers": 8, "d_model": 256}
    assert "too large" in run({"model": shape, "train": train}, on=few).warnings[0]


def test_files_that_are_no_model_folder_are_refused_by_what_they_are(tmp_path):
    gguf = tmp_path / "SmolLM2.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    for path in (gguf, tmp_path):
        problem = refused({"model": {"path": str(path)}})
        assert (problem.code, problem.where) == ("model-unsupported", str(gguf))
        assert "docs/models.md" in problem.remedy
    # A model folder may have the file that was made from it.
    folder = tmp_path / "my model"
    spec = models.family("llama").shape(d_model=64, layers=2, vocab_size=9000, context=128)
    write_header(folder, spec)
    gguf.rename(folder / gguf.name)
    assert run({"model": {"path": str(folder)}}).model == spec
    problem = refused({"model": {"path": str(folder / "model.safetensors")}})
    assert problem.code == "model-unsupported"
    assert problem.remedy == f"set model.path: '{folder}'"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "steps": st.integers(1, 3000),
            "tokens": st.sampled_from(["1x_params", "3M", 500_000]),
            "epochs": st.sampled_from([0.5, 2, 7]),
        },
    ),
    st.fixed_dictionaries(
        {}, optional={"time": st.sampled_from(["3m", "600s", "2h"]), "usd": st.just(0.2)}
    ),
    st.sampled_from([{}, {"global": "8k tokens"}, {"global": 7}, {"per_device": 3}]),
    st.integers(1, 3),
)
def test_no_limit_is_exceeded(length, budget, batch, devices):
    found = run(
        {
            "size": "tiny",
            "train": length | {"batch": batch},
            "budget": budget | {"usd_per_hour": 2.0},
        },
        devices=cluster(devices),
    )
    train = found.train
    count = count_parameters(found.model)
    tokens = train.steps * train.tokens_per_step
    one_step = train.tokens_per_step
    caps = [
        length.get("steps", math.inf) * one_step,
        {"1x_params": count, "3M": 3_000_000, 500_000: 500_000}.get(length.get("tokens"), math.inf),
        length.get("epochs", math.inf) * 2_000_000,
    ]
    seconds = [
        {"3m": 180, "600s": 600, "2h": 7200}.get(budget.get("time"), math.inf),
        budget.get("usd", math.inf) / 2 * 3600,
    ]
    assert tokens <= min(caps) or train.steps == 1
    deadline = None if min(seconds) == math.inf else min(seconds)
    assert train.deadline_s == (None if deadline is None else pytest.approx(deadline))
    step_s = -(-train.batch // devices) * train.seq_len / found.probe.speeds["bf16"].tokens_per_s
    assert train.steps * step_s <= 0.9 * min(seconds) * (1 + 1e-9)
    if min(caps) == math.inf and deadline is None:
        assert tokens <= min(20 * count, 4 * 2_000_000)
    most = {"steps": length.get("steps")} | {
        "tokens": max(1, int(min(caps) // one_step)) if min(caps) < math.inf else None
    }
    assert train.step_limit >= train.steps
    if deadline is None:
        assert train.step_limit == train.steps
    assert all(train.step_limit <= given for given in most.values() if given is not None)
    assert train.schedule.warmup_steps <= train.steps
    assert 1 <= train.steps / train.validate_every <= 12
    assert train.batch * train.seq_len <= 2_000_000


def test_validations_take_a_twentieth_or_are_few():
    small = run({"size": "tiny", "train": {"steps": 240, "batch": {"global": 8}}}).train
    assert (small.validate_every, small.validate_tokens) == (20, 6144)
    # 80 steps of 2,048 tokens: windows of 1,024 tokens would be a third of the compute.
    shape = {"model": {"layers": 2, "d_model": 64, "context": 1024}}
    few = {"steps": 80, "batch": {"global": 2}}
    large = run(shape | {"train": few}).train
    assert (large.validate_every, large.validate_tokens) == (20, 8 * 1024)
    between = run(shape | {"train": few | {"steps": 160}}).train
    assert 20 < 160 / between.validate_every * 4 <= 24 and between.validate_tokens == 8 * 1024


@pytest.mark.parametrize("rank", [0, 16])
def test_memory_is_what_a_trial_measured(rank):
    """Whether it took more than the predicted tensors, or gave some of the activations back."""
    there = cluster()
    model = models.family("llama").shape(d_model=256, layers=8, vocab_size=8192, context=256)
    if rank:
        model = msgspec.structs.replace(model, lora=Lora(rank=rank))
    train = TrainSpec(steps=1, batch=64, seq_len=256, precision="bf16")
    engine = load_engine("farspan")

    def memory_after(measured):
        speed = Speed(step_s=1.0, tokens_per_s=16384.0, memory_bytes=round(measured))
        probe = ProbeResult(rows=64, seq_len=256, speeds={"bf16": speed})
        calibrated = calibrate_cluster(there, model, train, engine, probe)
        return on_one_device(model, train, calibrated, engine).memory[0]

    before = on_one_device(model, train, there, engine).memory[0]
    tensors = before.total - before.framework - before.snapshot
    slack = before.activations * (activation_slack(models.graph(model), engine.on(("cpu",))) - 1)
    least = tensors - slack + before.framework
    assert least < tensors
    for measured in (tensors + 5e8, tensors + 1e7, tensors - 1e6, (least + tensors) / 2, least):
        found = memory_after(measured)
        assert found.total - found.snapshot == pytest.approx(measured, rel=1e-6)
    # Activations themselves are there, whatever was measured.
    found = memory_after(1e6)
    assert found.activations == before.activations
    assert found.total - found.snapshot == pytest.approx(least, rel=1e-6)


def test_with_time_alone_the_budget_is_used_up_to_16_epochs():
    config = {
        "size": "tiny",
        "budget": {"time": "10m"},
        "train": {"batch": {"global": "16 sequences"}},
    }
    long = run(config, on=corpus(10**9, 10**7))
    step_s = 16 * long.train.seq_len / long.probe.speeds["bf16"].tokens_per_s
    assert 0.9 * 600 - step_s < long.train.steps * step_s <= 0.9 * 600
    # A machine that is faster than its trial goes on: nothing but the time, and 16 epochs, ends it.
    assert long.train.step_limit == 16 * 10**9 // (16 * long.train.seq_len)
    short = run(config, on=corpus(50_000, 5_000))
    assert short.train.steps == 16 * 50_000 // (16 * 256)
    assert "epochs" in short.origin["train.steps"]


@pytest.mark.parametrize(
    ("length", "limit"),
    [
        ({"steps": 10**7}, 10**7),
        ({"tokens": 4096 * 10**6}, 10**6),
        ({"epochs": 2}, 2 * 10**9 // 4096),
    ],
)
def test_given_lengths_limit_a_run_that_is_faster_than_its_trial(length, limit):
    config = {
        "size": "tiny",
        "budget": {"time": "10m"},
        "train": {"batch": {"global": "16 sequences"}, **length},
    }
    found = run(config, on=corpus(10**9, 10**7)).train
    assert found.tokens_per_step == 4096
    assert found.steps < found.step_limit == limit
    short = run(config | {"budget": {"time": "1h"}, "train": config["train"] | {"steps": 3}})
    assert short.train.steps == short.train.step_limit == 3


def test_precision_is_the_fastest_that_every_device_has():
    assert run({}).train.precision == "bf16"
    only = run({}, devices=cluster(dtypes=("fp32",)))
    assert only.train.precision == "fp32" and only.origin["train.precision"].startswith("machine")
    assert run({"train": {"precision": "fp32"}}).train.precision == "fp32"
    problem = refused({"train": {"precision": "fp16"}})
    assert problem.code == "out-of-range" and "train.precision" in problem.where


def test_the_learning_rate_follows_the_table_within_its_scatter():
    table = {125e6: 6e-4, 350e6: 3e-4, 1.3e9: 2e-4, 2.7e9: 1.6e-4, 6.7e9: 1.2e-4, 13e9: 1e-4}
    for count, published in table.items():
        assert 0.7 < peak_rate(count) / published < 1.4
    assert peak_rate(1_000) == 3e-3
    assert run({"train": {"optimizer": {"lr": 0.01}}}).train.optimizer.lr == 0.01


def test_warnings_for_models_too_large_and_too_many_epochs():
    large = run({"size": "60M", "train": {"epochs": 9}})
    assert any("too large" in w for w in large.warnings) and any(
        "9 times" in w for w in large.warnings
    )
    assert (
        run({"size": "15M", "train": {"epochs": 1}}, on=corpus(300_000_000, 10**6)).warnings == ()
    )
    assert any("planning" in w for w in run({"model": {"preset": "opt-6.7b"}}).warnings)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"size": "smal"}, "size"),
        ({"size": "30X"}, "size"),
        ({"size": 0}, "size"),
        ({"size": "30M", "model": {"params": "30M"}}, "size"),
        ({"size": "30M", "model": {"preset": "gpt2"}}, "size"),
        ({"size": "100k"}, "size"),
        ({"model": {"params": "-3M"}}, "model.params"),
        ({"model": {"layers": 2, "d_model": 100, "heads": 3}}, "model"),
        (
            {"model": {"family": "gpt2", "layers": 2, "d_model": 64, "heads": 4, "kv_heads": 2}},
            "model",
        ),
        ({"model": {"preset": "gpt2", "family": "llama"}}, "model.family"),
        ({"model": {"preset": "gpt2", "context": 100_001}}, "model.context"),
        ({"model": {"context": 3_000_000}}, "model.context"),
        ({"data": {"source": "x", "val": "95%"}}, "data.val"),
        ({"data": {"source": "x", "val": 0}}, "data.val"),
        ({"data": {"source": "x", "val": "-5%"}}, "data.val"),
        ({"train": {"tokens": "-20x_params"}}, "train.tokens"),
        ({"train": {"tokens": "20 apples"}}, "train.tokens"),
        ({"train": {"batch": {"global": "10 tokens"}}}, "train.batch.global"),
        ({"train": {"batch": {"global": "3M tokens"}}}, "train.batch.global"),
        ({"train": {"batch": {"global": 0}}}, "train.batch.global"),
        ({"train": {"batch": {"per_device": 10_000}}}, "train.batch.per_device"),
        ({"train": {"batch": {"global": 8, "per_device": 8}}}, "train.batch.per_device"),
        ({"train": {"steps": 10, "warmup": 11}}, "train.warmup"),
        ({"budget": {"time": "soon"}}, "budget.time"),
        ({"budget": {"time": -5}}, "budget.time"),
        ({"budget": {"time": ".inf"}}, "budget.time"),
        ({"budget": {"time": float("inf")}}, "budget.time"),
        ({"budget": {"time": "1ms"}, "size": "tiny"}, "budget.time"),
        ({"budget": {"usd": 5}}, "budget.usd"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every"),
    ],
)
def test_values_out_of_range_are_refused_with_their_key(config, key):
    problem = refused(config)
    assert problem.code == "out-of-range"
    assert problem.where.endswith(f"key {key}")


def test_a_known_price_serves_a_dollar_budget():
    free = run({"size": "tiny", "budget": {"usd": 1}}, devices=cluster(2, usd_per_hour=0.0))
    assert free.train.deadline_s is None
    found = run({"size": "tiny", "budget": {"usd": 1}}, devices=cluster(2, usd_per_hour=0.5))
    assert found.train.deadline_s == pytest.approx(3600)


def test_small_corpora_get_shorter_windows_or_are_refused():
    assert run({"size": "tiny"}, on=corpus(3000, 100)).model.context == 64
    problem = refused({"size": "tiny"}, on=corpus(3000, 20))
    assert problem.code == "corpus-too-small" and "3000" in problem.fact and "33" in problem.fact
    assert problem.remedy == "write in run.yaml: data: {source: ~/papers, val: 10%}"
    problem = refused({"size": "tiny"}, on=corpus(300, 20))
    assert problem.remedy == "add text to '~/papers': about 624 B are missing"
    problem = refused({"model": {"preset": "gpt2"}}, on=corpus(3000, 500))
    assert problem.code == "corpus-too-small" and problem.remedy == "set model.context: 499"
    assert run({"model": {"preset": "gpt2", "context": 499}}, on=corpus(3000, 500)).train.batch >= 1
    problem = refused({"size": "tiny"}, on=corpus(100, 100), devices=cluster(3))
    assert problem.code == "corpus-too-small" and problem.remedy == "set parallel.workers: 1"


def test_resolved_values_record_their_origin_and_are_deterministic():
    first = run({"budget": {"time": "1h"}})
    second = run({"budget": {"time": "1h"}})
    assert first == second
    known = ("run.yaml", "default", "auto", "corpus", "machine")
    assert all(value.startswith(known) for value in first.origin.values()), first.origin
    preset = run({"model": {"preset": "gpt2"}, "budget": {"time": "1h"}}).origin
    assert all(value.startswith(known) for value in preset.values()), preset
    assert {"model.size", "model.context", "train.steps", "train.batch", "train.lr"} <= set(
        first.origin
    )
