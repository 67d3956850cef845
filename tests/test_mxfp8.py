"""`mok.mxfp8` against a slow definition in exact fractions, and against torchao where it is installed."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from mok import mxfp8

SLOW_E4M3 = {
    byte: Fraction(byte % 8, 8) * Fraction(2) ** -6
    if byte < 8
    else (1 + Fraction(byte % 8, 8)) * Fraction(2) ** (byte // 8 - 7)
    for byte in range(0x7F)
}  # the non-negative numbers of e4m3fn by their byte; 0x7F is NaN, and the sign is bit 7


def slow_scale_byte(values: list[float]) -> int:
    """The smallest byte b of 0..254 with amax <= 448 * 2^(b - 127); 255 for a block that is not finite."""
    if not all(math.isfinite(value) for value in values):
        return 255
    amax = max(abs(Fraction(value)) for value in values)
    return next(b for b in range(255) if amax <= 448 * Fraction(2) ** (b - 127))


def slow_round(value: Fraction) -> int:
    """The e4m3 byte nearest to a non-negative value, ties to the even byte."""
    return min(SLOW_E4M3, key=lambda byte: (abs(SLOW_E4M3[byte] - value), byte % 2))


def slow_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] to data bytes uint8 [rows, cols] and plain scales uint8 [rows, ceil(cols/32)]."""
    data, scales = [], []
    for row in x.double().tolist():
        blocks = [row[start : start + 32] for start in range(0, len(row), 32)]
        scales.append([slow_scale_byte(block) for block in blocks])
        data.append([])
        for block, byte in zip(blocks, scales[-1], strict=True):
            for value in block:
                sign = 0x80 if math.copysign(1.0, value) < 0 else 0
                finite = byte != 255
                data[-1].append(
                    sign | slow_round(abs(Fraction(value)) / Fraction(2) ** (byte - 127)) if finite else 0x7F
                )
    return torch.tensor(data, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8)


def assert_quantizes_as_defined(x: torch.Tensor) -> None:
    data, scales = mxfp8.quantize(x)
    want_data, want_scales = slow_quantize(x)
    assert torch.equal(mxfp8.untile_scales(scales, *x.shape), want_scales)
    assert torch.equal(data.view(torch.uint8), want_data)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (5, 40), (2, 1)])
def test_every_element_is_as_defined(dtype, shape):
    x = normal(*shape) * torch.exp2(4 * normal(*shape, seed=1))
    assert_quantizes_as_defined(x.to(dtype))


def test_float64_is_rounded_to_float32_first():
    x = normal(4, 64).double() * (1 + 2**-40)
    for got, want in zip(mxfp8.quantize(x), mxfp8.quantize(x.float()), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_each_e4m3_number_survives_and_each_tie_goes_to_even():
    """With 448 in the block the scale is 1. All 127 numbers, the 126 points half way, and their neighbours."""
    numbers = [float(value) for value in SLOW_E4M3.values()]
    ties = [(low + high) / 2 for low, high in itertools.pairwise(numbers)]
    values = torch.tensor(numbers + ties)
    values = torch.cat([values, values.nextafter(torch.tensor(0.0)), values.nextafter(torch.tensor(448.0))])
    values = torch.nn.functional.pad(torch.cat([values, -values]), (0, -2 * len(values) % 31)).view(-1, 31)
    x = torch.cat([torch.full((len(values), 1), 448.0), values], dim=1)
    assert (mxfp8.untile_scales(mxfp8.quantize(x)[1], *x.shape) == 127).all()
    assert_quantizes_as_defined(x)
    exact = torch.tensor(numbers[:31])
    assert torch.equal(
        mxfp8.dequantize(*mxfp8.quantize(torch.cat([exact, exact.new_tensor([448.0])])[None]))[0, :31], exact
    )


def test_the_scale_at_every_exponent():
    """amax just below, at and just above 448 * 2^e and 2^e, for every e of float32, denormals included."""
    powers = torch.tensor([2.0**e for e in range(-149, 128)])
    thresholds = torch.cat([powers, 1.75 * powers[2:], torch.tensor([torch.finfo(torch.float32).max])])
    inf = torch.tensor(math.inf)
    amax = torch.cat([thresholds.nextafter(-inf), thresholds, thresholds.nextafter(inf)])
    amax = amax[amax.isfinite()]
    x = torch.stack([amax, -0.3 * amax, 0.01 * amax], dim=1)
    assert_quantizes_as_defined(x)
    used = mxfp8.untile_scales(mxfp8.quantize(x)[1], *x.shape)
    assert set(used.flatten().tolist()) == set(range(0, 248)), "2^-127 up to 2^120"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_bits(dtype):
    """Every kind of number that the dtype has, mixed in one block."""
    generator = torch.Generator().manual_seed(5)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integers)
    x = torch.randint(info.min, info.max + 1, (64, 32), generator=generator).to(integers).view(dtype)
    assert not x.isfinite().all(), "the draw holds no NaN or inf"
    assert_quantizes_as_defined(x)


def test_nothing_saturates():
    """The scale is rounded up, so no element lies above 448, and the largest keeps three bits."""
    x = normal(64, 128) * torch.exp2(normal(64, 1, seed=1) * 20)
    block_max = mxfp8.quantize(x)[0].float().abs().unflatten(1, (4, 32)).amax(-1)
    assert ((block_max >= 224) & (block_max <= 448)).all()


def test_zero_blocks():
    x = torch.zeros(2, 64)
    x[1, 3] = -0.0
    data, scales = mxfp8.quantize(x)
    assert (mxfp8.untile_scales(scales, 2, 64) == 0).all()
    restored = mxfp8.dequantize(data, scales)
    assert torch.equal(restored, x) and torch.equal(restored.signbit(), x.signbit())


def test_float32_denormals():
    x = torch.full((1, 64), 2.0**-149)
    x[0, 32:] = 2.0**-130
    data, scales = mxfp8.quantize(x)
    restored = mxfp8.dequantize(data, scales)
    assert (restored[0, :32] == 0).all(), "below half of the smallest number, 2^-127 * 2^-9"
    assert (restored[0, 32:] == 2.0**-130).all()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_makes_its_block_nan(bad):
    x = normal(2, 96)
    x[1, 40] = bad
    data, scales = mxfp8.quantize(x)
    is_nan = torch.zeros(2, 96, dtype=torch.bool)
    is_nan[1, 32:64] = True
    assert torch.equal(mxfp8.dequantize(data, scales).isnan(), is_nan)
    assert (data.view(torch.uint8)[is_nan] == 0x7F).all()
    assert mxfp8.untile_scales(scales, 2, 96).tolist()[1][1] == 255


def test_dequantize_is_exact():
    """Every element byte under every scale byte, in float64 against fractions, in float32 and bfloat16 by rounding."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    data = bytes_.repeat(256, 1).view(torch.float8_e4m3fn)  # [256, 256], row = scale byte
    scales = mxfp8.tile_scales(bytes_[:, None].repeat(1, 8))
    got = mxfp8.dequantize(data, scales, torch.float64)
    for scale_byte in (0, 1, 126, 127, 128, 253, 254):
        want = [float(value * Fraction(2) ** (scale_byte - 127)) for value in SLOW_E4M3.values()]
        assert got[scale_byte, :127].tolist() == want
        assert got[scale_byte, 128:255].tolist() == [-value for value in want]
    assert got[:, [127, 255]].isnan().all() and got[255].isnan().all()
    for dtype in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(mxfp8.dequantize(data, scales, dtype), got.to(dtype), rtol=0, atol=0, equal_nan=True)
    in_range = (got.abs() >= 2.0**-130) & (got.abs() < 2.0**128)
    assert torch.equal(mxfp8.dequantize(data, scales, torch.bfloat16).double()[in_range], got[in_range])


@pytest.mark.parametrize("rows, cols", [(1, 32), (128, 128), (130, 160), (257, 512), (0, 64), (64, 0), (7, 33)])
def test_scale_tiles(rows, cols):
    num_blocks = -(-cols // 32)
    generator = torch.Generator().manual_seed(rows + cols)
    plain = torch.randint(0, 256, (rows, num_blocks), dtype=torch.uint8, generator=generator)
    tiled = mxfp8.tile_scales(plain)
    assert tiled.shape == (math.ceil(rows / 128), math.ceil(cols / 128), 32, 16) and tiled.is_contiguous()

    want = torch.zeros(tiled.shape, dtype=torch.uint8).flatten(2)
    for r in range(rows):
        for block in range(num_blocks):
            row_in_tile, kblock = r % 128, block % 4
            want[r // 128, block // 4, (row_in_tile % 32) * 16 + (row_in_tile // 32) * 4 + kblock] = plain[r, block]
    assert torch.equal(tiled.flatten(2), want)
    assert torch.equal(mxfp8.untile_scales(tiled, rows, cols), plain)


def test_stacked_experts_and_strided_views():
    gate_up_proj = normal(3, 80, 64)
    view = gate_up_proj[:, 40:]
    data, scales = mxfp8.quantize(view)
    assert data.shape == (3, 40, 64) and scales.shape == (3, 1, 1, 32, 16) and data.is_contiguous()
    for expert in range(3):
        one_data, one_scales = mxfp8.quantize(view[expert].clone())
        assert torch.equal(data[expert].view(torch.uint8), one_data.view(torch.uint8))
        assert torch.equal(scales[expert], one_scales)
    assert torch.equal(mxfp8.dequantize(data, scales)[2], mxfp8.dequantize(data[2], scales[2]))


def test_the_transposed_form_is_a_second_quantisation():
    weight = normal(2, 48, 96) * torch.exp2(6 * normal(2, 48, 96, seed=1))
    data, scales, data_t, scales_t = mxfp8.quantize_weight(weight)
    assert data_t.shape == (2, 96, 48) and data_t.is_contiguous()
    assert scales_t.shape == (2, 1, 1, 32, 16)
    want_data, want_scales = slow_quantize(weight[1].T)
    assert torch.equal(data_t[1].view(torch.uint8), want_data)
    assert torch.equal(mxfp8.untile_scales(scales_t, 96, 48)[1], want_scales)
    both_ways = mxfp8.dequantize(data_t, scales_t).mT
    assert not torch.equal(both_ways, mxfp8.dequantize(data, scales)), "the forms differ where the blocks do"
    assert mxfp8.quantize_weight(weight, True, False)[2:] == (None, None)
    assert mxfp8.quantize_weight(weight, False, True)[:2] == (None, None)


def test_quantize_weights_takes_the_three_of_a_layer():
    gate_up_proj, down_proj = normal(2, 2 * 40, 64).requires_grad_(), normal(2, 64, 40)
    weights = mxfp8.quantize_weights(gate_up_proj[:, :40], gate_up_proj[:, 40:], down_proj)
    for got, source in zip(weights, (gate_up_proj[:, :40], gate_up_proj[:, 40:], down_proj), strict=True):
        assert [tensor.requires_grad for tensor in got] == [False] * 4
        for got_tensor, want_tensor in zip(got, mxfp8.quantize_weight(source), strict=True):
            assert torch.equal(got_tensor.view(torch.uint8), want_tensor.view(torch.uint8))


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_rounding_has_no_bias(low):
    """The mean signed error of evenly spread numbers vanishes as 1/sqrt(n); truncation would leave -0.02 for low 0."""
    generator = torch.Generator().manual_seed(7)
    x = torch.empty(8192, 128).uniform_(low, 1.0, generator=generator)
    error = mxfp8.dequantize(*mxfp8.quantize(x)).double() - x.double()
    assert error.std() > 0.01, "this data is not rounded at all"
    assert abs(error.mean()) < 4 * error.std() / error.numel() ** 0.5


def test_ties_have_no_bias():
    """Numbers half way between two e4m3 numbers go up as often as down."""
    low = torch.tensor([1 + step / 8 for step in range(8)])
    x = torch.cat([low + 1 / 16, torch.full((24,), 1.75)])[None]  # scale 2^-8
    error = (mxfp8.dequantize(*mxfp8.quantize(x)) - x)[0, :8]
    assert (error != 0).all() and error.sum() == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_relative_error_does_not_depend_on_the_magnitude(scale):
    """Per element at most 2^-4 of itself above the smallest normal of its block, at most 2^-10 of the scale below."""
    x = normal(64, 128) * scale
    data, scales = mxfp8.quantize(x)
    step = mxfp8.untile_scales(scales, 64, 128).view(torch.float8_e8m0fnu).double().repeat_interleave(32, 1)
    error = (mxfp8.dequantize(data, scales, torch.float64) - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, step * 2.0**-10)).all()
    assert 0.02 < error.norm() / x.double().norm() < 0.03


BAD_CALLS = {
    "x: .*float32 or .* got torch.int32": lambda: mxfp8.quantize(torch.zeros(2, 32, dtype=torch.int32)),
    r"x: expected .* got torch.float32 \[32\]": lambda: mxfp8.quantize(torch.zeros(32)),
    r"x: expected .* got torch.float32 \[1, 2, 3, 4\]": lambda: mxfp8.quantize(torch.zeros(1, 2, 3, 4)),
    "data: expected torch.float8_e4m3fn": lambda: mxfp8.dequantize(torch.zeros(2, 32), torch.zeros(1, 1, 32, 16)),
    r"data scales: expected torch.uint8 \[1, 1, 32, 16\].* got torch.float32": lambda: mxfp8.dequantize(
        torch.zeros(2, 32).to(torch.float8_e4m3fn), torch.zeros(1, 1, 32, 16)
    ),
    r"data scales: expected torch.uint8 \[2, 1, 32, 16\].* got torch.uint8 \[1, 1, 32, 16\]": lambda: mxfp8.dequantize(
        torch.zeros(129, 32).to(torch.float8_e4m3fn), torch.zeros(1, 1, 32, 16, dtype=torch.uint8)
    ),
    r"tiled: expected torch.uint8 \[1, 2, 32, 16\]": lambda: mxfp8.untile_scales(
        torch.zeros(1, 1, 32, 16, dtype=torch.uint8), 128, 160
    ),
    "plain: expected torch.uint8": lambda: mxfp8.tile_scales(torch.zeros(128, 4)),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_errors_name_expected_and_actual(message):
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message]()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_same_bits(dtype):
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integers)
    x = torch.randint(info.min, info.max + 1, (512, 96), generator=torch.Generator().manual_seed(11))
    x = torch.cat([x.to(integers).view(dtype), normal(512, 96).to(dtype)])
    x = torch.where(x.isfinite() | (torch.arange(96) < 64), x, 0)
    pair, gpu_pair = mxfp8.quantize(x), mxfp8.quantize(x.cuda())
    restored, gpu_restored = mxfp8.dequantize(*pair), mxfp8.dequantize(*gpu_pair)
    assert torch.equal(gpu_pair[0].cpu().view(torch.uint8), pair[0].view(torch.uint8))
    assert torch.equal(gpu_pair[1].cpu(), pair[1])
    torch.testing.assert_close(gpu_restored.cpu(), restored, rtol=0, atol=0, equal_nan=True)


def test_torchao_agrees():
    """torchao's RCEIL mode is the same rule, but where it takes the scale 2^-127 it does not divide by it, and an inf
    gives it the scale 2^127; both are left out here."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    x = normal(200, 160) * torch.exp2(normal(200, 1, seed=1) * 20)
    x[3, 32:64], x[7, 1] = 0, math.nan
    for dtype in (torch.float32, torch.bfloat16):
        want_scales, want_data = mx_tensor.to_mx(
            x.to(dtype), torch.float8_e4m3fn, 32, scaling_mode=config.ScaleCalculationMode.RCEIL
        )
        data, scales = mxfp8.quantize(x.to(dtype))
        assert torch.equal(data.view(torch.uint8), want_data.view(torch.uint8))
        assert torch.equal(mxfp8.untile_scales(scales, 200, 160), want_scales.view(torch.uint8))
        assert torch.equal(scales.flatten(), utils.to_blocked(want_scales.view(torch.uint8)))


def test_where_no_element_is_subnormal_the_direction_of_the_blocks_does_not_matter():
    """Rounding to three bits is the same under every power of two. Elements within 2^13 of each other stay normal."""
    x = torch.exp2(torch.empty(96, 64).uniform_(0, 13, generator=torch.Generator().manual_seed(9)))
    along_rows, along_cols = mxfp8.round_trip(x, 1), mxfp8.round_trip(x, 0)
    assert torch.equal(along_rows, along_cols) and not torch.equal(along_rows, x)
    assert torch.equal(mxfp8.round_trip(along_rows, 0), along_rows)
    x[5, 7] *= 2.0**20
    assert not torch.equal(mxfp8.round_trip(x, 1), mxfp8.round_trip(x, 0)), (
        "an outlier in a block costs the others bits"
    )
