"""Flat AdamW against torch's own, schedules against hand calculations."""

import itertools
import math

import pytest
import torch
from torch import nn

from farspan.domain.train import Optimizer, Schedule
from farspan.models import preset, presets
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.state import train_state
from farspan.runtime.state.train_state import TrainState
from farspan.runtime.state.zero_buckets import ZeroDivision, divide_buckets, weight_decay_segment
from farspan.semantics.lr_schedule import learning_rate


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


@pytest.mark.parametrize("ignoring", [frozenset(), frozenset({"cpu"})])
def test_updates_equal_torch_adamw_with_decay_on_matrices_only(monkeypatch, ignoring):
    """Clipped by the fused update, and before it where that ignores the scale, as on Apple's
    GPUs."""
    scales = []
    fused = torch._fused_adamw_

    def noting(*tensors, grad_scale, **options):
        scales.append(grad_scale)
        return fused(*tensors, grad_scale=grad_scale, **options)

    monkeypatch.setattr(torch, "_fused_adamw_", noting)
    monkeypatch.setattr(train_state, "IGNORES_GRAD_SCALE", ignoring)
    ours = _model()
    reference = _model()
    optimizer = Optimizer(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.9)
    state = TrainState(ours, "fp32")
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=optimizer.eps,
    )
    for step in range(1, 6):
        x = torch.randn(4, 5)
        for model in (ours, reference):
            (model(x) ** 2).sum().backward()
        norm = math.sqrt(state.squared_grad_norm())
        assert norm == pytest.approx(
            float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5)), rel=1e-5
        )
        state.optimizer_step(optimizer, 1e-2, step, max(1.0, norm / 0.5))
        adamw.step()
        adamw.zero_grad()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert all((scale is None) == bool(ignoring) for scale in scales)
    with pytest.raises(
        RuntimeError, match="got no gradient"
    ):  # Nor would the last step's be used again.
        state.optimizer_step(optimizer, 1e-2, 6, 1.0)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("fp32", 1e-5)])
@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_accumulate_in_fp32_over_backward_passes_until_cleared(precision, bound, zero):
    model = _model()
    whole = _model()
    state = TrainState(model, precision, division=ZeroDivision(zero=zero))
    exact = dict(whole.named_parameters())
    for _ in range(3):
        x = torch.randn(64, 5)
        whole.zero_grad()
        (whole(x) ** 2).sum().backward()
        for part in x.to(state.dtype).split(4):
            (model(part) ** 2).sum().backward()
        assert all(grad.dtype == torch.float32 for grad in state.grad)
        for i, name in enumerate(state.names):
            assert (
                float(
                    (state.view_parameter(state.grad, i) - exact[name].grad).norm()
                    / exact[name].grad.norm()
                )
                < bound
            )
        state.clear_gradients()


def test_masters_stay_fp32_and_small_updates_are_not_lost_to_bf16():
    model = nn.Linear(8, 8, bias=False)
    state = TrainState(model, "bf16")
    (master,) = state.master
    (grad,) = state.grad
    before = master.clone()
    for step in range(1, 11):
        state.parameters[0].sum().backward()
        assert (grad == 1.0).all()
        state.optimizer_step(Optimizer(weight_decay=0.0), 1e-5, step, 1.0)
    torch.testing.assert_close(before - master, torch.full_like(before, 1e-4), rtol=1e-2, atol=0)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight.flatten(), master.bfloat16())


def test_learning_rates_by_hand():
    cosine = Schedule(kind="cosine", warmup_steps=4, floor=0.1)
    rates = [learning_rate(cosine, 1.0, step, 14) for step in range(14)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == pytest.approx(1.0)
    assert rates[9 - 1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 4 / 9)))
    assert rates[13] == pytest.approx(0.1)
    linear = Schedule(kind="linear", warmup_steps=1, floor=0.2)
    assert [learning_rate(linear, 1.0, s, 6) for s in range(6)] == pytest.approx(
        [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    )
    constant = Schedule(kind="constant", warmup_steps=2)
    assert [learning_rate(constant, 1.0, s, 9) for s in (0, 2, 8)] == pytest.approx(
        [1 / 3, 1.0, 1.0]
    )
    wsd = Schedule(kind="wsd", warmup_steps=1, decay=0.5, floor=0.0)
    assert [learning_rate(wsd, 1.0, s, 10) for s in range(10)] == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.125]
    )


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_no_step_of_a_decay_to_zero_has_a_learning_rate_of_zero(kind):
    for steps in (2, 3, 10, 1000):
        for warmup in (0, 1, steps // 2):
            schedule = Schedule(kind=kind, warmup_steps=warmup, floor=0.0)
            rates = [learning_rate(schedule, 1.0, step, steps) for step in range(steps)]
            assert min(rates) > 0 and rates[warmup:] == sorted(rates[warmup:], reverse=True)
            # Beyond its steps, or its time, too.
            assert learning_rate(schedule, 1.0, steps + 5, steps) > 0
            assert learning_rate(schedule, 1.0, steps - 1, steps, share=1.0) > 0


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_learning_rates_of_short_runs_are_positive_and_bounded(kind, steps):
    for warmup in (0, 1, 5, 10):
        schedule = Schedule(kind=kind, warmup_steps=warmup)
        for step in range(steps):
            assert 0 < learning_rate(schedule, 3e-4, step, steps) <= 3e-4


def _starts(tensors):
    """Bytes from the start of its storage at which each tensor begins."""
    return [tensor.storage_offset() * tensor.itemsize for tensor in tensors]


@pytest.mark.parametrize("name", sorted(presets()))
def test_parameters_and_owned_parts_begin_at_16_bytes_for_any_number_of_ranks(name):
    """Kernels load 16 bytes at a time where a tensor begins at a multiple of them, else more
    slowly."""
    with torch.device("meta"):
        model = Decoder(preset(name).spec)
    meta = torch.device("meta")
    for ways, (zero, precision) in itertools.product(
        range(1, 9), ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"))
    ):
        division = ZeroDivision(zero=zero, ways=ways, index=ways - 1, bucket_bytes=25_000_000)
        state = TrainState(model, precision, meta, division)
        gradients = [one for one in state.collected if one is not None]
        starts = _starts(
            [
                *state.parameters,
                *state.shards,
                *state.master,
                *state.exp_avg,
                *state.grad,
                *gradients,
            ]
        )
        assert [start % 16 for start in starts] == [0] * len(starts), (ways, zero, precision)


@pytest.mark.parametrize("bucket_bytes", [None, 300, 10**6])
@pytest.mark.parametrize("sliced", [frozenset(), frozenset({"b"})])
def test_parameters_of_any_shape_begin_at_16_bytes_inside_their_bucket(bucket_bytes, sliced):
    names = ["a", "b", "c", "d"]
    shapes = [torch.Size(one) for one in ((5, 7), (3,), (11, 3), (1,))]
    for ways, zero in itertools.product(range(1, 9), range(4)):
        parts = [
            divide_buckets(
                names,
                shapes,
                ZeroDivision(
                    zero=zero, ways=ways, index=i, bucket_bytes=bucket_bytes, sliced=sliced
                ),
            )
            for i in range(ways)
        ]
        for bucket in itertools.chain.from_iterable(parts):
            updated = [
                piece.start
                for decayed in (True, False)
                if (piece := weight_decay_segment(bucket, decayed))
            ]
            assert all(2 * start % 16 == 0 for start in (*bucket.starts, bucket.size, *updated)), (
                bucket
            )
        for buckets in zip(*parts, strict=True):
            if buckets[0].ways == 1:
                continue
            assert [one.own.start for one in buckets] == [
                0,
                *(one.own.stop for one in buckets[:-1]),
            ]
            assert buckets[-1].own.stop == buckets[-1].size
            assert {(one.own.stop - one.own.start) * 2 % 16 for one in buckets} == {0}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_bucket_padding_stays_zero_and_counts_in_no_norm(zero):
    model = _model()
    whole = _model()
    state = TrainState(
        model, "fp32", division=ZeroDivision(zero=zero, ways=1 if zero == 0 else 2, index=0)
    )
    (bucket,) = state.buckets
    with torch.no_grad():
        for mine, other in zip(state.parameters, whole.parameters(), strict=True):
            mine.copy_(other)  # As if the other worker's part had been gathered.
    for _ in range(2):
        x = torch.randn(4, 5)
        whole.zero_grad()
        for one in (model, whole):
            (one(x) ** 2).sum().backward()
        full = state.collected[0]
        exact = sum(float(parameter.grad.norm()) ** 2 for parameter in whole.parameters())
        assert float(full.norm()) ** 2 == pytest.approx(exact, rel=1e-5)
        filling = torch.ones(bucket.size, dtype=torch.bool)
        for i, shape in enumerate(state.shapes):
            start = state.home[i][1]
            filling[start : start + shape.numel()] = False
        assert filling.any() and not full[filling].any()
        full[filling] = math.nan  # As a codec leaves it beside an infinity.
        state.collected[0] = full if zero < 2 else None
        state.clear_gradients()
