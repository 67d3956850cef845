"""Argument checks with one wording: argument, expected, actual. None of them waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Letters stand for a size that this check does not fix; they appear in the message.
Shape = Sequence[int | str]


def describe(value: object) -> str:
    """`torch.float32 [128, 2048] on cpu` for a tensor, the type's name for anything else."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return type(value).__name__


def check_tensor(
    name: str,
    value: object,
    shape: Shape,
    dtype: torch.dtype | Sequence[torch.dtype],
    device: torch.device | None = None,
) -> Tensor:
    """Return `value` if it is a tensor of this shape, (one of) these dtypes and this device.

    Raises TypeError if it is no tensor, else ValueError.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, {_expected(shape, dtypes, device)}, got {describe(value)}")
    fits = value.dim() == len(shape) and all(
        isinstance(want, str) or want == size for want, size in zip(shape, value.shape, strict=True)
    )
    if not fits or value.dtype not in dtypes or (device is not None and value.device != device):
        raise ValueError(f"{name}: expected {_expected(shape, dtypes, device)}, got {describe(value)}")
    return value


def _expected(shape: Shape, dtypes: Sequence[torch.dtype], device: torch.device | None) -> str:
    text = f"{' or '.join(map(str, dtypes))} [{', '.join(map(str, shape))}]"
    return text if device is None else f"{text} on {device}"


def check_contiguous_rows(name: str, value: Tensor) -> None:
    """Raise ValueError unless the elements of the last dimension lie next to each other."""
    if value.shape[-1] > 1 and value.numel() > 0 and value.stride(-1) != 1:
        raise ValueError(f"{name}: expected the last dimension contiguous (stride 1), got strides {value.stride()}")


def check_int(name: str, value: object, minimum: int) -> int:
    """Return `value` if it is an integer of at least `minimum`; else raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected int, got {type(value).__name__} {value!r}")
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")
    return value
