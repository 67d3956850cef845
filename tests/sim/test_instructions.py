"""Each group of instructions against plain torch or Python; the kernels cite their sections of the PTX ISA."""

import math

import pytest
import torch
from cases import CASES, TILES, WGMMAS, approximation_inputs, float_inputs, integer_inputs, store_at, warp_inputs
from simulator import KERNELS, Simulator, SimulatorError, compile_ptx
from torch import Tensor

from mok.testing import relative_l2

SEEDS = [0, 1, 2, 3]


def run(name: str, seed: int = 0) -> dict[str, Tensor]:
    return CASES[name](Simulator(seed=seed))


def u32(x: int) -> int:
    return x & 0xFFFFFFFF


def s32(x: int) -> int:
    return u32(x) - (1 << 32) if u32(x) >> 31 else u32(x)


def permute_bytes(a: int, b: int, selector: int) -> int:
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = [selector >> (4 * i) & 15 for i in range(4)]
    picked = [(0xFF if pool[n & 7] & 0x80 else 0) if n & 8 else pool[n & 7] for n in nibbles]
    return int.from_bytes(bytes(picked), "little")


def extract(a: int, position: int, length: int, signed: bool) -> int:
    field = (s32(a) if signed else a) >> position  # Python's shift keeps the sign as bfe does beyond bit 31
    field &= (1 << length) - 1
    return field - (1 << length) if signed and field >> (length - 1) else field


INTEGER_ROWS = [
    lambda a, b, c: a + b,
    lambda a, b, c: a - b,
    lambda a, b, c: a * b,
    lambda a, b, c: a * b >> 32,
    lambda a, b, c: s32(a) * s32(b) >> 32,
    lambda a, b, c: a * b + c,
    lambda a, b, c: a // b,
    lambda a, b, c: a % b,
    lambda a, b, c: min(s32(a), s32(b)),
    lambda a, b, c: max(a, b),
    lambda a, b, c: a.bit_count(),
    lambda a, b, c: 32 - a.bit_length(),
    lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    lambda a, b, c: a.bit_length() - 1,
    lambda a, b, c: abs(s32(a)),
    lambda a, b, c: extract(a, b & 31, 7, False),
    lambda a, b, c: extract(a, b & 31, 9, True),
    lambda a, b, c: b & ~(31 << (c & 31)) | (a & 31) << (c & 31),
    lambda a, b, c: a & b,
    lambda a, b, c: a ^ b,
    lambda a, b, c: a & b | ~a & c,
    lambda a, b, c: a << (b & 63) if (b & 63) < 32 else 0,
    lambda a, b, c: s32(a) >> min(b & 63, 31),
    lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    lambda a, b, c: (b << 32 | a) >> min(c & 63, 32),
    lambda a, b, c: permute_bytes(a, b, c),
    lambda a, b, c: (a * b + c & (1 << 64) - 1) >> 17,
    lambda a, b, c: int(math.fmod(s32(a), 1000003)),
    lambda a, b, c: c + (a + b >> 32),
    lambda a, b, c: a if s32(a) < s32(b) else c,
    lambda a, b, c: a >> 16 | a << 16,
]


def test_integers() -> None:
    inputs = [[u32(v) for v in t.tolist()] for t in integer_inputs()]
    inputs[1] = [v or 3 for v in inputs[1]]
    out = run("integers")["out"]
    for row, formula in enumerate(INTEGER_ROWS):
        expected = [u32(formula(*values)) for values in zip(*inputs, strict=True)]
        assert [u32(v) for v in out[row].tolist()] == expected, f"row {row}"


def pairs(high: Tensor, low: Tensor) -> Tensor:
    """Two 16-bit (or 8-bit) tensors as the halves of one integer."""
    bits = 8 * high.element_size()
    view = {8: torch.uint8, 16: torch.int16}[bits]
    return high.view(view).int() << bits | low.view(view).int() & ((1 << bits) - 1)


def test_floats() -> None:
    a, b, c = float_inputs()
    out = run("floats")["out"]
    finite = torch.isfinite(a) & torch.isfinite(b)

    def same(row: int, expected: Tensor, where: Tensor | None = None) -> None:
        actual = out[row]
        if expected.dtype == torch.float32:
            is_nan = expected.isnan()
            assert torch.equal(actual.view(torch.float32).isnan(), is_nan), f"row {row}"
            actual, expected = actual.masked_fill(is_nan, 0), expected.view(torch.int32).masked_fill(is_nan, 0)
        where = torch.ones_like(a, dtype=torch.bool) if where is None else where
        assert torch.equal(actual[where], expected[where]), f"row {row}"

    same(0, a + b)
    same(1, a * b)
    same(3, a / b)
    same(4, torch.fmin(a, b), (a != b) & ~(a.isnan() & b.isnan()))
    same(5, torch.maximum(a, b), a != b)
    same(6, a.abs().double().sqrt().float())
    number = ~a.isnan() & ~b.isnan()
    same(7, pairs(a.bfloat16(), b.bfloat16()), number)
    same(8, (a.view(torch.int32) >> 16 << 16) | (b.view(torch.int32) >> 16 & 0xFFFF), number)
    same(9, pairs(a.relu().bfloat16(), b.relu().bfloat16()), number & (a != 0) & (b != 0))
    same(10, pairs(a.half(), b.half()), number)
    limit = torch.tensor(448.0)
    same(11, pairs(*(t.clamp(-limit, limit).to(torch.float8_e4m3fn) for t in (a, b))), number)
    limit = torch.tensor(57344.0)
    same(12, pairs(*(t.clamp(-limit, limit).to(torch.float8_e5m2) for t in (a, b))), number)
    inside = finite & (a.abs() < 2**31)
    same(13, a.round().nan_to_num(0).long().int(), inside)
    same(14, a.nan_to_num(0).clamp(0, 2.0**31).long().int(), inside)
    same(15, a.floor().nan_to_num(0).long().int(), inside)
    same(16, a.view(torch.int32).float())
    unsigned = (a.view(torch.int32).long() & 0xFFFFFFFF).double()
    nearest = unsigned.float()
    same(17, torch.where(nearest.double() > unsigned, nearest.nextafter(torch.tensor(0.0)), nearest))
    # A fused multiply-add rounds once: the product of two floats is exact in double, and so is most of the sum.
    exact = a.double() * b.double() + c.double()
    close = finite & torch.isfinite(exact.float()) & (exact != 0)
    error = (out[2].view(torch.float32).double() - exact).abs()[close]
    assert (error <= exact.abs()[close] * 2.0**-24 * 1.0001 + 2.0**-149).all()


def test_conversions_from_fp8() -> None:
    a, b, _ = float_inputs()
    number = ~a.isnan() & ~b.isnan()
    limit = torch.tensor(448.0)
    expected = pairs(*(t.clamp(-limit, limit).to(torch.float8_e4m3fn).half() for t in (a, b)))
    assert torch.equal(run("floats")["out"][19][number], expected[number])


def test_approximations() -> None:
    a, out = approximation_inputs(), run("approximations")["out~"]
    expected = [torch.exp2(a), 1 / a, torch.tanh(a), torch.log2(a.abs()), a.abs().rsqrt()]
    for row, values in enumerate(expected):
        assert torch.allclose(out[row], values, rtol=1e-6, atol=1e-6), row


# ue8m0 needs sm_100 to compile, so this one is PTX: scales of OCP MX, rounded up or towards zero (9.7.9.22).
SCALES = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry scales(.param .u64 in, .param .u64 out) {
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .f32 %f<2>; .reg .b16 %h<3>;
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [in]; ld.param.u64 %rd1, [out];
    mad.wide.u32 %rd2, %r0, 4, %rd0; mad.wide.u32 %rd3, %r0, 4, %rd1;
    ld.global.f32 %f0, [%rd2];
    cvt.rp.satfinite.ue8m0x2.f32 %h0, %f0, %f0;
    cvt.rz.satfinite.ue8m0x2.f32 %h1, 0f00000000, %f0;
    cvt.u32.u16 %r1, %h0; cvt.u32.u16 %r2, %h1;
    and.b32 %r1, %r1, 255; shl.b32 %r2, %r2, 8; or.b32 %r1, %r1, %r2;
    st.global.u32 [%rd3], %r1;
    ret;
}
"""


def test_scales() -> None:
    values = [1.0, 1.5, 2.0, 0.75, 2.0**-126, 2.0**-127, 3e38, float("inf"), float("nan"), 0.0, 2.0**-130]
    up = [127, 128, 128, 127, 1, 0, 254, 254, 255, 0, 0]
    down = [127, 127, 128, 126, 1, 0, 254, 254, 255, 0, 0]
    source, out = torch.tensor(values), torch.zeros(len(values), dtype=torch.int32)
    Simulator().load(SCALES).launch("scales", args=[source, out], block=len(values))
    assert [(v & 255, v >> 8) for v in out.tolist()] == list(zip(up, down, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_exchange(seed: int) -> None:
    v, out = warp_inputs().tolist(), run("warp_exchange", seed)["out"].tolist()
    lanes = range(32)
    assert out[0] == [v[5]] * 32
    assert out[1] == [v[i - 3] if i >= 3 else v[i] for i in lanes]
    assert out[2] == [v[i + 2] if i % 8 < 6 else v[i] for i in lanes]
    assert out[3] == [v[i ^ 9] for i in lanes]
    assert u32(out[4][0]) == sum((v[i] > 0) << i for i in lanes)
    assert out[5] == [3] * 32
    assert [u32(x) for x in out[6]] == [sum((v[k] & 3 == v[i] & 3) << k for k in lanes) for i in lanes]
    assert out[7] == [sum(v)] * 32
    assert out[8] == [max(v)] * 32
    assert out[9] == [1] * 32
    assert out[10] == [v[31] if i % 2 else 1 for i in lanes]


@pytest.mark.parametrize("seed", SEEDS)
def test_divergence(seed: int) -> None:
    out = run("divergence", seed)["out"].tolist()

    def expected(lane: int, n: int) -> int:
        value, steps = n, 0
        while value > 1 and steps < 500:
            value, steps = 3 * value + 1 if value % 2 else value // 2, steps + 1
        by_case = [steps + 100, steps * 3 + n, steps ^ 0x55, -steps, steps.bit_count(), steps * steps, steps + lane, 7]
        return by_case[n & 7]

    assert out[0] == [expected(lane, n) for lane, n in enumerate((warp_inputs().abs() + 1).tolist())]
    assert out[1] == [32] * 32
    assert out[2] == [21] * 21 + [0] * 11


@pytest.mark.parametrize("seed", SEEDS)
def test_memory(seed: int) -> None:
    result = run("memory", seed)
    assert result["counters"].tolist() == [128, 127, 77, 42]
    assert result["sums"].tolist() == [16.0] * 4 + [128.0] * 4
    assert result["out"].abs().sum() > 0
    out_bytes = result["out"][:, 0].contiguous().view(torch.int8).view(128, 4)[:, 3]
    assert torch.equal(out_bytes, torch.arange(64, dtype=torch.int8).repeat(2))


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers(seed: int) -> None:
    result = run("named_barriers", seed)
    assert torch.equal(result["out"][:256].view(4, 64), result["values"].view(4, 64).flip(1) * 2)
    assert result["out"][256:].tolist() == [1] * 128
    result = run("ring", seed)
    assert torch.equal(result["out"], result["values"].flip(1))
    assert run("registers", seed)["out"].tolist() == [1] * 128 + [2] * 128


@pytest.mark.parametrize("seed", SEEDS)
def test_cluster(seed: int) -> None:
    out, lanes = run("cluster", seed)["out"], torch.arange(32)
    for block in range(8):
        before = (block - 1) % 4
        assert torch.equal(out[block, 0], (before * 100 + lanes).int())
        assert torch.equal(out[block, 1], (before * 1000 + 2 * lanes + 7 + before).int())


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async(seed: int) -> None:
    result = run("cp_async", seed)
    expected = torch.zeros(192, 4, dtype=torch.int32)
    expected[:180] = result["values"]
    for t in range(64):
        expected[64 + t, (0 if t % 3 == 0 else 4 if t % 3 == 1 else 2) :] = 0
    assert torch.equal(result["out"].view(3, 64, 4), expected.view(3, 64, 4).flip(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk(seed: int) -> None:
    result = run("bulk", seed)
    assert torch.equal(result["out"], result["values"] * 2 + 1)
    assert torch.equal(result["sums"], (result["values"] * 2 + 1).sum(0))


def padded_tile(source: Tensor, x: int, y: int, width: int) -> Tensor:
    padded = torch.zeros(200, 200, dtype=source.dtype)
    padded[80:120, 80:116] = source
    return padded[80 + y : 88 + y, 80 + x : 80 + x + width]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("index", range(len(TILES)))
def test_tensor_tile(index: int, seed: int) -> None:
    result = run(f"tensor_tile_{index}", seed)
    swizzle, width, x, y = TILES[index]
    tile = padded_tile(result["source"], x, y, width)
    chunks = tile.reshape(-1, 4)  # of 16 bytes
    raw = torch.empty_like(chunks)
    for k in range(len(chunks)):
        raw[k ^ (k >> 3 & swizzle // 16 - 1) if swizzle else k] = chunks[k]
    assert torch.equal(result["raw"].view(-1, 4), raw)
    target = torch.zeros(200, 200, dtype=torch.int32)
    left, top = store_at(x, y)
    target[top : top + 8, left : left + width] = tile
    assert torch.equal(result["target"], target[:40, :36])


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast(seed: int) -> None:
    result = run("multicast", seed)
    assert torch.equal(result["out"], result["source"].expand(2, 32, 16))


def test_wgmma() -> None:
    result = run("wgmma")
    expected = result["a"].double() @ result["b"].double().T
    for name in WGMMAS:
        assert relative_l2(result[f"{name}~"], expected) < 1e-6, name
    result = run("wgmma_registers")
    assert relative_l2(result["out~"], result["a"].double() @ result["b"].double().T) < 1e-6


def test_fragments() -> None:
    result = run("fragments")
    start = torch.tensor([[0.0, 1.0] * 4, [2.0, 3.0] * 4]).repeat_interleave(8, 0)
    expected = result["a"].float() @ result["b"].float() + start
    assert torch.equal(result["exact"], expected)
    assert torch.equal(result["out"], expected.bfloat16())


@pytest.mark.parametrize("seed", range(8))
def test_gemm(seed: int) -> None:
    result = run("gemm", seed)
    expected = result["a"].double() @ result["b"].double().T
    assert relative_l2(result["c~"], expected) < 1.1 * relative_l2(expected.bfloat16(), expected)


def test_unknown_instruction_is_named() -> None:
    ptx = SCALES.replace("cvt.u32.u16 %r1, %h0;", "sad.u32 %r1, %r2, %r2, %r2;")
    with pytest.raises(ValueError, match=r"unknown instruction sad\.u32"):
        Simulator().load(ptx).decode("scales")
    with pytest.raises(ValueError, match=r"unknown modifier \.hi"):
        Simulator().load(SCALES.replace("shl.b32", "shl.hi.b32")).decode("scales")


def test_speed() -> None:
    """At least 20 million thread-instructions a second, with every check on."""
    sim = Simulator()
    module = sim.load(compile_ptx(KERNELS / "alu.cu"))
    inputs = [t.repeat(64) for t in integer_inputs()]
    inputs[1][inputs[1] == 0] = 3
    out = torch.zeros(31, len(inputs[0]), dtype=torch.int32)
    before = sim.statistics()
    module.launch("integers", args=[*inputs, out, len(inputs[0])], grid=32, block=256)
    after = sim.statistics()
    assert (after[0] - before[0]) / (after[1] - before[1]) > 20e6


def test_the_same_seed_gives_the_same_interleaving() -> None:
    ptx = compile_ptx(KERNELS / "gemm.cu", ["BUG=3"])

    def errors(seed: int) -> str:
        from cases import launch_gemm

        with pytest.raises(SimulatorError) as raised:
            launch_gemm(Simulator(seed=seed), ptx)
        return str(raised.value)

    assert errors(5) == errors(5)
