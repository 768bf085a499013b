"""Times of units that were measured go before the roofline: alone, in a crowd, between counts of
rows, and divided."""

from __future__ import annotations

import msgspec
import pytest

from farspan import models
from farspan.domain.cluster import UnitTime
from farspan.domain.engine import Activity, Moves
from tests.estimate.parts import TIED, cluster, costs, device, plain

SEQ_LEN = 16


def timed(rows: int, forward_s: float, backward_s: float, together: int = 1) -> UnitTime:
    return UnitTime(
        model=models.graph(TIED).units_hash,
        unit="block",
        dtype="fp32",
        rows=rows,
        seq_len=SEQ_LEN,
        forward_s=forward_s,
        backward_s=backward_s,
        together=together,
    )


def block_s(
    *times: UnitTime,
    rows: int,
    splits: dict[str, str] | None = None,
    ways: int = 1,
    kernels: dict[Activity, Moves] | None = None,
    **changes: object,
):
    one = device(units=times, **changes)
    using = costs(cluster([[one, one]]), plain(kernels=kernels or {}), seq_len=SEQ_LEN)
    return using.unit_s(0, using.graph.block, rows, splits or {}, ways)


def test_a_unit_takes_what_it_was_timed_at_and_lies_on_a_line_between():
    times = timed(2, 0.1, 0.2), timed(4, 0.3, 0.6)
    assert block_s(*times, rows=2) == pytest.approx((0.1, 0.2))
    assert block_s(*times, rows=3) == pytest.approx((0.2, 0.4))
    assert block_s(*times, rows=8) == pytest.approx((0.7, 1.4))
    assert block_s(times[0], rows=8) == pytest.approx((0.4, 0.8))
    # Where small ones take their overheads alone, noise must not make large ones cheaper.
    assert block_s(timed(4, 0.3, 0.6), timed(8, 0.29, 0.61), rows=256) == pytest.approx(
        (0.29, 0.61 + 248 / 4 * 0.01)
    )
    assert block_s(*times, rows=2, pace=1.5) == pytest.approx((0.15, 0.3))


def test_times_of_compiled_units_are_never_mixed_with_eager_ones():
    eager = timed(2, 0.1, 0.2)
    compiled = msgspec.structs.replace(timed(2, 0.05, 0.1), compiled=True)
    both = device(units=(eager, compiled))
    for asked, expected in ((False, (0.1, 0.2)), (True, (0.05, 0.1))):
        using = costs(cluster([[both, both]]), plain(), seq_len=SEQ_LEN, compile=asked)
        assert using.unit_s(0, using.graph.block, 2, {}, 1) == pytest.approx(expected)
    # A device with times of compiled units alone has none where it does not compile.
    alone = costs(cluster([[device(units=(compiled,))]]), plain(), seq_len=SEQ_LEN)
    bare = costs(cluster([[device()]]), plain(), seq_len=SEQ_LEN)
    block = bare.graph.block
    assert alone.unit_s(0, block, 2, {}, 1) == bare.unit_s(0, block, 2, {}, 1)


def test_unit_times_of_another_model_dtype_length_or_unit_are_ignored():
    usual = block_s(rows=2)
    other = {"model": "another", "dtype": "bf16", "seq_len": 32, "unit": "head"}
    for key, value in other.items():
        one = msgspec.structs.replace(timed(2, 1.0, 1.0), **{key: value})
        assert block_s(one, rows=2) == usual


def test_unit_times_are_those_measured_with_as_many_co_located_workers():
    alone = timed(2, 0.1, 0.2)
    together = timed(2, 0.15, 0.5, together=2)
    assert block_s(alone, together, rows=2) == pytest.approx((0.15, 0.5))
    # Three were timed together, two are at work: threads and cores say what they get.
    crowd = timed(2, 0.9, 0.9, together=3)
    assert block_s(alone, crowd, rows=2) == pytest.approx((0.1, 0.2))


def test_operators_and_their_parts_share_a_units_time_as_the_roofline_has_it():
    splits = {"mlp.up": "f", "mlp.act": "f", "mlp.down": "f"}
    usual = block_s(rows=2)
    divided = block_s(rows=2, splits=splits, ways=2)
    found = block_s(timed(2, 0.1, 0.2), rows=2, splits=splits, ways=2)
    assert found == pytest.approx((0.1 * divided[0] / usual[0], 0.2 * divided[1] / usual[1]))


MEGATRON = {
    "attn.qkv": "n",
    "attn": "n",
    "attn.out": "n",
    "mlp.up": "f",
    "mlp.act": "f",
    "mlp.down": "f",
}


@pytest.mark.parametrize(
    ("activity", "share"),
    [("residual", 1.0), ("layernorm", 1.0), ("gelu", 0.5), ("weight", 0.5)],
)
def test_a_tensor_axis_divides_of_a_timed_unit_only_what_its_splits_divide(activity, share):
    """Of two devices, where one activity takes nearly all of the unit's time."""
    kernels = {activity: Moves(working=(1e6, 1e6))}
    found = block_s(timed(2, 0.1, 0.2), rows=2, splits=MEGATRON, ways=2, kernels=kernels)
    assert found == pytest.approx((0.1 * share, 0.2 * share), rel=1e-3)


def test_residuals_that_are_divided_by_rows_divide_their_part_of_a_timed_unit():
    kernels = {"residual": Moves(working=(1e6, 1e6))}
    splits = {**MEGATRON, "residual": "b"}
    found = block_s(timed(2, 0.1, 0.2), rows=2, splits=splits, ways=2, kernels=kernels)
    assert found == pytest.approx((0.05, 0.1), rel=1e-3)
