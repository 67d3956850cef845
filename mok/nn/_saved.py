"""Schedule and context of a forward as tensors of which only the number is fixed: what an op can return to a compiler
that knows nothing of the routing.

`saved` has the bytes of each field, one-dimensional; `header` says, on the CPU, how to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from mok.functional import MoKForwardContext, MoKSchedule

_DTYPES = (torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pack(
    schedule: MoKSchedule, context: MoKForwardContext, num_local_tokens: int, device: torch.device, given: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """`(header, saved)`, to be read by `unpack`.

    header: num_local_tokens; then for each field whether it is on the CPU, its dtype's index, its number of dimensions
    and their sizes, and, for a field on the CPU while x is elsewhere, its elements. saved: the other fields' bytes.
    """
    header = [num_local_tokens]
    saved: list[Tensor] = []
    tensors = [getattr(part, field.name) for part in (schedule, context) for field in fields(part)]
    for tensor in distinct(tensors, given):
        in_header = tensor.device != device
        header += [in_header, _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        if in_header:
            header += tensor.flatten().tolist()
        if in_header or tensor.numel() == 0:
            tensor = torch.empty(0, dtype=torch.uint8, device=device)
        saved.append(tensor.contiguous().view(-1).view(torch.uint8))
    return torch.tensor(header, dtype=torch.int64, device="cpu"), saved


def unpack(
    header: Tensor,
    saved: Sequence[Tensor],
    schedule_type: type[MoKSchedule],
    context_type: type[MoKForwardContext],
) -> tuple[MoKSchedule, MoKForwardContext, int]:
    num_local_tokens, *codes = header.tolist()
    tensors = []
    for stored in saved:
        in_header, dtype, dim, *codes = codes
        shape, codes = codes[:dim], codes[dim:]
        if in_header:
            count = torch.Size(shape).numel()
            tensors.append(torch.tensor(codes[:count], dtype=_DTYPES[dtype], device="cpu").view(shape))
            codes = codes[count:]
        else:
            tensors.append(stored.view(_DTYPES[dtype]).view(shape))
    num_fields = len(fields(schedule_type))
    return schedule_type(*tensors[:num_fields]), context_type(*tensors[num_fields:]), num_local_tokens


def distinct(results: Sequence[Tensor], *inputs: Tensor) -> list[Tensor]:
    """`results`, copied where they share memory with each other or with `inputs`, which those of an op must not."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    distinct = []
    for tensor in results:
        pointer = tensor.untyped_storage().data_ptr()
        distinct.append(tensor.clone() if pointer in seen else tensor)
        seen.add(pointer)
    return distinct
