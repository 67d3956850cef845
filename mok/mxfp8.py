"""MXFP8: e4m3 elements that share one power-of-two scale per 32 values of the contraction dimension.

The format is OCP Microscaling (MX) 1.0; the scale is amax / 448 rounded up to a power of two, as Blackwell's
`cvt.rp.satfinite.ue8m0x2` rounds, so nothing ever saturates. `docs/numerics.md` has the reasons.

A quantised matrix is a pair
    data    float8_e4m3fn `[..., rows, cols]`, the contraction dimension last
    scales  uint8 `[..., ceil(rows/128), ceil(cols/128), 32, 16]`, E8M0: byte b means 2^(b - 127), 255 means NaN
and a weight that is also needed along its other dimension is `(data, scales, data_t, scales_t)`, where the second
pair is the quantisation of the transposed matrix `[..., cols, rows]` (not the transpose of the first pair).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mok._checks import check_tensor

BLOCK_SIZE = 32
TILE_SIZE = 128

Pair = tuple[Tensor, Tensor]
BothForms = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize(x: Tensor) -> Pair:
    """Quantise along the last dimension; blocks are counted from column 0, a last short block is allowed.

    scale = max(2^-127, 2^ceil(log2(amax / 448))); data = round_to_nearest_even(x / scale). Everything before that one
    rounding is exact, denormals included. A block of zeros gets 2^-127. A block that holds an inf or a NaN becomes NaN
    as a whole (scale byte 255, data bytes 0x7F), so that an overflow stays visible.

    x: float32, bfloat16, float16 or float64 (rounded to float32 first), `[rows, cols]` or `[E, rows, cols]`, strided.
    Returns (data, scales) as the module says. Raises ValueError for another rank or dtype. Not differentiable.
    """
    _check_matrix("x", x, (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    cols = x.shape[-1]
    num_blocks = -(-cols // BLOCK_SIZE)
    padded = F.pad(x.detach().float(), (0, num_blocks * BLOCK_SIZE - cols))
    blocks = padded.unflatten(-1, (num_blocks, BLOCK_SIZE))

    # 448 = 1.75 * 2^8. Adding 2^23 - 1 - 0x600000 to the bits of amax carries into its exponent field exactly when the
    # significand is above 1.75, which is the rounding up; the other terms move the exponent by 8.
    amax_bits = blocks.abs().amax(-1).view(torch.int32)
    is_finite = (amax_bits >> 23) < 255
    exponent = (((amax_bits + 0x1FFFFF) >> 23) - 8).clamp(min=0)
    inverse_scale = ((254 - exponent) << 23).view(torch.float32)
    scaled = torch.where(is_finite.unsqueeze(-1), blocks * inverse_scale.unsqueeze(-1), torch.nan)

    data = scaled.to(torch.float8_e4m3fn).flatten(-2)[..., :cols].contiguous()
    return data, tile_scales(torch.where(is_finite, exponent, 255).to(torch.uint8))


def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """data * scale, `[..., rows, cols]`. Exact in float64; in float32 too except that 256 * 2^120 and above is inf;
    in bfloat16 too except below 2^-130, where it rounds.
    """
    check_pair("data", data, scales)
    rows, cols = data.shape[-2:]
    per_block = untile_scales(scales, rows, cols).view(torch.float8_e8m0fnu)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    per_element = per_block.to(wide).repeat_interleave(BLOCK_SIZE, dim=-1)[..., :cols]
    return (data.to(wide) * per_element).to(dtype)


def quantize_weight(
    weight: Tensor, return_normal: bool = True, return_transposed: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Both forms of one weight: (data, scales, data_t, scales_t), with None for a form that was not asked for.

    weight: `[rows, cols]` or `[E, rows, cols]`; data_t is contiguous `[..., cols, rows]` with blocks along rows.
    """
    normal = quantize(weight) if return_normal else (None, None)
    transposed = quantize(weight.mT) if return_transposed else (None, None)
    return *normal, *transposed


def quantize_weights(
    routed_gate: Tensor, routed_up: Tensor, routed_down: Tensor
) -> tuple[BothForms, BothForms, BothForms]:
    """The three routed weights in the form that `mok.functional` takes, in its order.

    routed_gate, routed_up `[E_l, I, H]`, routed_down `[E_l, H, I]`; views such as `gate_up_proj[:, :I]` will do.
    Quantise once per optimiser step and hand the same tuples to forward and backward. Forward would do with the first
    pair of each; backward with the second pair of `routed_down`.
    """
    return (
        (*quantize(routed_gate), *quantize(routed_gate.mT)),
        (*quantize(routed_up), *quantize(routed_up.mT)),
        (*quantize(routed_down), *quantize(routed_down.mT)),
    )


def round_trip(x: Tensor, dim: int) -> Tensor:
    """`x [rows, cols]` as a matmul that sums over `dim` (0 or 1) reads it: quantised along it, in the dtype of x."""
    return dequantize(*quantize(x), x.dtype) if dim == 1 else dequantize(*quantize(x.mT), x.dtype).mT


def expand_weight(weight: tuple[Tensor, ...], dtype: torch.dtype, *, in_backward: bool) -> Tensor:
    """A weight that `check_weight` passed, `[E, rows, cols]`: forward sums over cols, so it reads the normal form, and
    backward over rows, so it reads the transposed one."""
    if in_backward:
        return dequantize(weight[-2], weight[-1], dtype).mT
    return dequantize(weight[0], weight[1], dtype)


def tile_scales(plain: Tensor) -> Tensor:
    """Plain scales uint8 `[..., rows, ceil(cols/32)]` to tiles `[..., ceil(rows/128), ceil(cols/128), 32, 16]`.

    Scale (r, b) is byte `(r % 32)*16 + (r % 128 // 32)*4 + b % 4` of tile (r // 128, b // 4). Padding is byte 0: it is
    finite, so a kernel that reads whole tiles gets 0 * 2^-127 from it and no NaN.
    """
    _check_matrix("plain", plain, torch.uint8)
    rows, num_blocks = plain.shape[-2:]
    padded = F.pad(plain, (0, -num_blocks % 4, 0, -rows % TILE_SIZE))
    split = padded.unflatten(-1, (padded.shape[-1] // 4, 4)).unflatten(-3, (padded.shape[-2] // TILE_SIZE, 4, 32))
    return split.transpose(-4, -2).flatten(-2)  # row_tile, quarter, row, col_tile, block: swap quarter and col_tile


def untile_scales(tiled: Tensor, rows: int, cols: int) -> Tensor:
    """The way back: tiles of a `[..., rows, cols]` matrix to plain scales uint8 `[..., rows, ceil(cols/32)]`."""
    _check_tiles("tiled", tiled, (*tiled.shape[:-4], rows, cols), tiled.device)
    plain = tiled.unflatten(-1, (4, 4)).transpose(-4, -2).flatten(-2).flatten(-4, -2)
    return plain[..., :rows, : -(-cols // BLOCK_SIZE)].contiguous()


def check_weight(
    name: str, weight: tuple[Tensor, ...], shape: Sequence[int | str], device: torch.device, *, in_backward: bool
) -> Sequence[int]:
    """Raise unless `weight` is an MXFP8 weight of this shape `[E, rows, cols]` (a letter is a size not fixed).

    Four tensors are both forms; two are the only form that the call reads: the normal one in forward, the transposed
    one in backward. Returns the shape without letters.
    """
    if len(weight) not in (2, 4):
        raise ValueError(
            f"{name}: expected (data, scales) or (data, scales, data_t, scales_t), got a tuple of {len(weight)}"
        )
    if len(weight) == 4 or not in_backward:
        shape = check_tensor(f"{name} data", weight[0], shape, torch.float8_e4m3fn, device).shape
        check_pair(f"{name} data", weight[0], weight[1])
    if len(weight) == 4 or in_backward:
        shape_t = (shape[0], shape[2], shape[1])
        shape = check_tensor(f"{name} data_t", weight[-2], shape_t, torch.float8_e4m3fn, device).mT.shape
        check_pair(f"{name} data_t", weight[-2], weight[-1])
    sizes = [int(size) for size in shape]
    if sizes[1] % BLOCK_SIZE or sizes[2] % BLOCK_SIZE:
        raise ValueError(f"{name}: expected multiples of {BLOCK_SIZE} for MXFP8, got {sizes}")
    return sizes


def check_pair(name: str, data: Tensor, scales: Tensor) -> None:
    """Raise unless (data, scales) is a quantised matrix or a stack of them, both on one device."""
    _check_matrix(name, data, torch.float8_e4m3fn)
    _check_tiles(f"{name} scales", scales, data.shape, data.device)


def _check_matrix(name: str, x: Tensor, dtype: torch.dtype | tuple[torch.dtype, ...]) -> None:
    is_stack = isinstance(x, Tensor) and x.dim() == 3
    check_tensor(name, x, ("E", "rows", "cols") if is_stack else ("rows", "cols"), dtype)


def _check_tiles(name: str, scales: Tensor, shape: Sequence[int], device: torch.device) -> None:
    *experts, rows, cols = shape
    tiles = (-(-rows // TILE_SIZE), -(-cols // TILE_SIZE))
    check_tensor(name, scales, (*experts, *tiles, 32, 16), torch.uint8, device)
