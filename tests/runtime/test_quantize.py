"""Fewer bits: how far decoded numbers may be off, what must never look finite, and that errors do
not add up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.runtime.comm.quantize import (
    ENCODE_ELEMENTS,
    GREATEST,
    SCALE_ELEMENTS,
    SMALLEST_SCALE,
    Codec,
    ErrorFeedback,
)
from tests.examples import few

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SIZES = [
    0,
    1,
    2,
    SCALE_ELEMENTS - 1,
    SCALE_ELEMENTS,
    SCALE_ELEMENTS + 1,
    5 * SCALE_ELEMENTS + 77,
    ENCODE_ELEMENTS,
    2 * ENCODE_ELEMENTS + SCALE_ELEMENTS + 3,
]
FEW = pytest.mark.parametrize("bits", [4, 8])
ALL = pytest.mark.parametrize("bits", [4, 8, 16, 32])


def numbers(n, seed=0, dtype=torch.float32):
    """Heavy-tailed, in blocks of very different sizes, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.arange(n).div(SCALE_ELEMENTS, rounding_mode="floor").mul(7).remainder(19).sub(9)
    x = torch.randn(n, generator=generator).pow(3) * 10.0**power
    return x.mul(torch.rand(n, generator=generator) > 0.1).to(dtype)


def largest(x):
    """For every element of x (n,), the greatest absolute value of its block."""
    blocks = [block.abs().max().expand(len(block)) for block in x.float().split(SCALE_ELEMENTS)]
    return torch.cat(blocks)


@ALL
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_sizes_types_and_zeros(bits, n, device):
    codec = Codec(bits)
    x = numbers(n).to(device)
    data = codec.quantize(x)
    back = codec.dequantize(data, n)
    assert (data.dtype, back.dtype) == (torch.uint8, torch.float32)
    assert (data.shape, back.shape) == ((codec.encoded_size(n),), (n,))
    assert (data.device, back.device) == (x.device, x.device)
    assert not back[x == 0].any()


def test_sizes_by_hand():
    assert [Codec(bits).encoded_size(1000) for bits in (32, 16, 8, 4)] == [
        4000,
        2000,
        1000 + 4 * 2,
        500 + 4 * 2,
    ]
    assert [Codec(bits).encoded_size(257) for bits in (32, 16, 8, 4)] == [
        1028,
        514,
        257 + 2 * 2,
        129 + 2 * 2,
    ]


def test_bytes_by_hand():
    """Greatest values 7 and 127 of the codes: steps of 1, which is 0x3F80 in bf16. Halves go to the
    even number."""
    four = torch.tensor([7.0, -7, 1, 0, -2.6])
    eight = torch.tensor([127.0, -1, 0.5, -1.5])
    assert Codec(4).quantize(four).tolist() == [0x80, 0x3F, 15 + 1 * 16, 9 + 8 * 16, 5 + 8 * 16]
    assert Codec(8).quantize(eight).tolist() == [0x80, 0x3F, 127, 255, 0, 254]


@FEW
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("device", DEVICES)
def test_no_number_is_off_by_more_than_half_a_step_of_its_block(bits, dtype, n, device):
    codec = Codec(bits)
    x = numbers(n, dtype=dtype).to(device)
    error = (codec.dequantize(codec.quantize(x), n).double() - x.double()).abs()
    # The scale is off by at most 1/256, being bf16; the quotient by two roundings of fp32, in 127
    # steps.
    step = (largest(x).double() / GREATEST[bits] * (1 + 2**-8)).clamp(min=SMALLEST_SCALE)
    assert (error <= step * (0.5 + 127 * 2**-23)).all()


@FEW
@given(
    st.lists(
        st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126), min_size=1, max_size=40
    )
)
def test_half_a_step_holds_for_any_finite_numbers(bits, values):
    codec = Codec(bits)
    x = torch.tensor(values)
    back = codec.dequantize(codec.quantize(x), len(x))
    step = (largest(x).double() / GREATEST[bits] * (1 + 2**-8)).clamp(min=SMALLEST_SCALE)
    assert ((back.double() - x.double()).abs() <= step * (0.5 + 127 * 2**-23)).all()


def test_16_bits_are_bf16_and_32_are_exact():
    x = numbers(1001)
    assert torch.equal(Codec(16).dequantize(Codec(16).quantize(x), 1001), x.bfloat16().float())
    assert torch.equal(Codec(32).dequantize(Codec(32).quantize(x), 1001), x)


@ALL
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    "place", [0, 1, SCALE_ELEMENTS - 1, SCALE_ELEMENTS + 5, 3 * SCALE_ELEMENTS]
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_is_not_finite_never_looks_finite(bits, bad, place, device):
    codec = Codec(bits)
    x = numbers(3 * SCALE_ELEMENTS + 1).to(device)
    clean = codec.dequantize(codec.quantize(x), len(x))
    x[place] = bad
    back = codec.dequantize(codec.quantize(x), len(x))
    here = torch.arange(len(x), device=device) // SCALE_ELEMENTS == place // SCALE_ELEMENTS
    assert not back[here if bits < 16 else place].isfinite().any()
    assert torch.equal(back[~here], clean[~here]), "other blocks are as they would be without it"


@ALL
@pytest.mark.parametrize("device", DEVICES)
def test_equal_bytes_decode_to_equal_bits_wherever_they_lie(bits, device):
    codec = Codec(bits)
    x = numbers(2 * ENCODE_ELEMENTS + 77)
    data = codec.quantize(x)
    assert torch.equal(data, codec.quantize(x))
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), data]).to(device)
    first, second = (
        codec.dequantize(part, len(x)).cpu().view(torch.int32) for part in (data, message[3:])
    )
    assert torch.equal(first, second)


@FEW
def test_decoding_is_the_scale_times_the_code(bits):
    """Each product is exact in fp32, so there is one result on any device."""
    codec = Codec(bits)
    x = numbers(4 * SCALE_ELEMENTS, seed=3)
    data = codec.quantize(x)
    scale = data[:8].view(torch.bfloat16).double().repeat_interleave(SCALE_ELEMENTS)
    if bits == 8:
        codes = data[8:].view(torch.int8).double()
    else:
        codes = torch.tensor(
            [half - 8.0 for byte in data[8:].tolist() for half in (byte % 16, byte // 16)]
        )
    assert torch.equal(codec.dequantize(data, len(x)).double(), scale * codes)


@ALL
def test_encoded_and_decoded_tensors_share_no_memory_with_their_inputs(bits):
    codec = Codec(bits)
    x = torch.ones(10)
    data = codec.quantize(x)
    back = codec.dequantize(data, 10)
    x.zero_()
    assert torch.equal(codec.dequantize(data, 10), back)
    data.zero_()
    assert back.all()


def test_a_message_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="9 bytes for 8 numbers, which take 10"):
        Codec(8).dequantize(torch.zeros(9, dtype=torch.uint8), 8)


@pytest.mark.parametrize("bits", [4, 8, 16])
@few(20)
@given(n=st.integers(1, 3 * SCALE_ELEMENTS), steps=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_with_feedback_the_sums_stay_within_one_rounding(bits, n, steps, seed):
    """What was received differs from what was to be sent by the residual, which is one encoding's
    error."""
    feedback = ErrorFeedback(Codec(bits))
    generator = torch.Generator().manual_seed(seed)
    sent, received, bound = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    for _ in range(steps):
        x = torch.randn(n, generator=generator)
        before = feedback.residuals.get("k", torch.zeros(n)).clone()
        sent += x.double()
        total = x + before
        received += feedback.codec.dequantize(feedback.quantize_("k", x), n).double()
        bound = largest(total) / GREATEST[bits] * 0.502 if bits < 16 else total.abs() * 2**-8
    rounding = 1e-6 * steps  # Of the sums in fp32.
    assert ((sent - received).abs() <= bound + rounding).all()
    torch.testing.assert_close(
        sent - received, feedback.residuals["k"].double(), rtol=0, atol=rounding
    )


def test_feedback_sends_what_is_too_small_to_send_alone():
    """A number of a hundredth of its block's step is lost each time without feedback, and arrives
    with it."""
    x = torch.tensor([127.0, 0.01])
    feedback = ErrorFeedback(Codec(8))
    alone = sum(feedback.codec.dequantize(feedback.codec.quantize(x), 2) for _ in range(1000))
    fed = sum(feedback.codec.dequantize(feedback.quantize_(0, x.clone()), 2) for _ in range(1000))
    assert alone[1] == 0
    assert fed[1] == pytest.approx(10, abs=0.51)


def test_feedback_keeps_keys_apart():
    feedback = ErrorFeedback(Codec(4))
    x = numbers(100)
    one = feedback.quantize_("a", x.clone())
    assert torch.equal(feedback.quantize_("b", x.clone()), one)
    feedback.quantize_("a", x.clone())
    assert not torch.equal(feedback.residuals["a"], feedback.residuals["b"])


@ALL
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_with_feedback_everyone_has_the_bits_that_were_sent(bits, n, device):
    """The sender's own numbers become those that its bytes decode to, by the very bits: all add the
    same."""
    feedback = ErrorFeedback(Codec(bits))
    for seed in (0, 1):
        x = numbers(n, seed).to(device)
        data = feedback.quantize_("k", x)
        assert torch.equal(feedback.codec.dequantize(data, n), x)
        total = torch.ones_like(x)
        feedback.codec.add_dequantized(total, data)
        assert torch.equal(total, 1 + x)


def test_feedback_recovers_after_a_number_that_was_not_finite():
    feedback = ErrorFeedback(Codec(8))
    x = torch.linspace(-1, 1, 100)
    bad = x.clone()
    bad[7] = float("nan")
    assert not feedback.codec.dequantize(feedback.quantize_(0, bad), 100).isfinite().any()
    assert torch.equal(feedback.quantize_(0, x.clone()), feedback.codec.quantize(x)), (
        "nothing of it is left"
    )


def test_feedback_over_32_bits_keeps_nothing():
    feedback = ErrorFeedback(Codec(32))
    x = numbers(100)
    assert torch.equal(feedback.quantize_(0, x), feedback.codec.quantize(x))
    assert not feedback.residuals
