"""Memory and time by hand calculation; the formula against what autograd really keeps."""

from __future__ import annotations

import pytest

from farspan import models
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.model import parameters
from farspan.domain.probe import ProbeResult, Speed
from farspan.domain.train import TrainSpec
from farspan.estimate.memory import activation_bytes_per_row, memory_bytes, state_bytes
from farspan.estimate.price import estimate
from farspan.techniques.data import plan


def train_spec(**changes):
    return TrainSpec(**({"steps": 100, "batch": 12, "seq_len": 64, "precision": "fp32"} | changes))


def cluster(devices, cpus=None, **changes):
    device = Device(**({"kind": "cpu", "backend": "cpu", "memory": 8 * 10**9, "dtypes": ("fp32", "bf16")} | changes))
    host = Host(name="here", devices=(device,) * devices, cpus=cpus or devices, memory=16 * 10**9)
    return Cluster(sites=(Site(name="home", hosts=(host,)),))


def probe(**changes):
    speed = Speed(step_s=0.1, tokens_per_s=2560.0, memory_bytes=10**9)
    return ProbeResult(**({"rows": 4, "seq_len": 64, "speeds": {"fp32": speed}} | changes))


MODEL = models.family("gpt2").shape(d_model=64, layers=2, vocab_size=500, context=64)


def test_state_is_16_bytes_a_parameter_in_fp32_and_18_below():
    assert state_bytes(MODEL, train_spec()) == 16 * parameters(MODEL)
    assert state_bytes(MODEL, train_spec(precision="bf16")) == 18 * parameters(MODEL)


@pytest.mark.parametrize(("family", "knobs"), [("gpt2", {}), ("llama", {}), ("llama", {"heads": 6, "kv_heads": 1})])
@pytest.mark.parametrize("attention", ["sdpa", "vanilla"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_autograd_keeps(family, knobs, attention, recompute):
    torch = pytest.importorskip("torch")
    from farspan.runtime.model import Decoder, initialise

    spec = models.family(family).shape(d_model=192, layers=4, vocab_size=300, context=128, **knobs)
    model = Decoder(spec, attention=attention, recompute=recompute).train()
    initialise(model, 0)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = 4
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.hidden(torch.zeros(rows, 128, dtype=torch.long))
    train = train_spec(seq_len=128, attention=attention, recompute=recompute)
    predicted = activation_bytes_per_row(spec, train, "cpu")
    if recompute:  # A whole layer is made again only during the backward pass.
        predicted -= activation_bytes_per_row(spec, train_spec(seq_len=128, attention=attention), "cpu") // spec.layers
        predicted += 128 * 192 * 4 * (2 if family == "llama" else 1)  # The final norm.
    assert hidden.requires_grad
    assert sum(kept.values()) / rows == pytest.approx(predicted, rel=0.1)


def test_a_step_takes_the_busiest_ranks_rows_at_the_measured_speed():
    found = estimate(plan(MODEL, cluster(5), train_spec(), corpus="c"), cluster(5), probe())
    assert found.step_s == pytest.approx(3 * 64 / 2560)  # 12 sequences over 5 ranks: 3 on the busiest.
    assert found.tokens_per_s == pytest.approx(12 * 64 / found.step_s)
    assert found.run_s == pytest.approx(100 * found.step_s / 0.9)
    assert found.usd is None


def test_workers_without_a_core_of_their_own_share_the_cores_there_are():
    def step_s(devices, **changes):
        here = cluster(devices, **changes)
        return estimate(plan(MODEL, here, train_spec(), corpus="c"), here, probe()).step_s

    # Six workers with 2 rows each are no faster on two cores than two workers with 6 rows each.
    assert step_s(6, cpus=2) == pytest.approx(step_s(2, cpus=2))
    assert step_s(3, cpus=4, threads=2) == pytest.approx(1.5 * step_s(3, cpus=6, threads=2))
    assert step_s(2, cpus=1, backend="cuda") == step_s(2, cpus=2, backend="cuda")


def test_money_deadline_and_memory():
    here = cluster(2, usd_per_hour=1.5)
    train = train_spec(deadline_s=2.0)
    found = estimate(plan(MODEL, here, train, corpus="c"), here, probe())
    assert found.run_s == 2.0
    assert found.usd == pytest.approx(3.0 * 2 / 3600)
    per_row = activation_bytes_per_row(MODEL, train, "cpu")
    assert found.memory_bytes == 10**9 + 2 * per_row + 25 * 2**20  # 6 rows where the probe had 4, and one bucket.
    other_length = estimate(plan(MODEL, here, train, corpus="c"), here, probe(seq_len=32))
    assert other_length.memory_bytes == memory_bytes(MODEL, train, 6, "cpu") + 25 * 2**20


def test_the_techniques_name_changes_nothing():
    import msgspec

    made = plan(MODEL, cluster(2), train_spec(), corpus="c")
    renamed = msgspec.structs.replace(made, technique="something else")
    assert estimate(made, cluster(2), probe()) == estimate(renamed, cluster(2), probe())
