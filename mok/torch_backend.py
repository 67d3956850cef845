"""The backend that runs anywhere: routes sorted by expert, one matmul per expert, collectives of torch.distributed.

Gradients are the formulas of the design, written out; autograd takes no part. Every sum has a fixed order, so that the
result has the same bits for every expert-parallel size (for the same number of CPU threads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mok import mxfp8
from mok._types import (
    ExpertWeights,
    MainGrads,
    MoKForwardContext,
    MoKGradients,
    MoKSchedule,
    MoKWorkspace,
    NeedsGrad,
)


@dataclass
class TorchSchedule(MoKSchedule):
    """Also says how rows travel. S routes of this rank are not dropped; sent and returned in row order.

    row_source [R]: where each row's token is among the tokens that arrived (with one rank: x itself).
    sent_token [S]: the token of each row that is sent; empty with one rank, where nothing is.
    route_return [T, K]: where each route's result is among those that come back, -1 if dropped.
    split_sizes [2, ranks]: rows sent to, and received from, each rank; on the CPU.
    """

    row_source: Tensor
    sent_token: Tensor
    route_return: Tensor
    split_sizes: Tensor


def make_buffers(workspace: MoKWorkspace) -> None:
    """None are needed: torch's allocator keeps them."""


# Schedule


def build_schedule(workspace: MoKWorkspace, top_experts: Tensor, num_local_experts: int) -> TorchSchedule:
    communicator = workspace.communicator
    num_experts = num_local_experts * communicator.size
    local_ids = top_experts.to(torch.int32)
    all_ids = _gather_ids(workspace, local_ids)
    sorted_ids, order = torch.where(all_ids < 0, num_experts, all_ids).sort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=all_ids.device)
    offsets = torch.searchsorted(sorted_ids, experts, out_int32=True)  # [E + 1] over the rows of all ranks
    _check_capacity(workspace, offsets[::num_local_experts])

    dropped = local_ids < 0
    route_rank = local_ids.div(num_local_experts, rounding_mode="floor")  # also maps -1 to -1
    first_route = communicator.rank * workspace.num_local_tokens * workspace.topk
    route_row = _inverse(order)[first_route : first_route + local_ids.numel()].view_as(local_ids)
    route_row = (route_row - offsets[(route_rank * num_local_experts).clamp(min=0)]).masked_fill(dropped, -1)
    first_expert = communicator.rank * num_local_experts
    row_route = order.to(torch.int32)
    if communicator.size > 1 or not row_route.is_cuda:
        first_row, end_row = offsets[first_expert].item(), offsets[first_expert + num_local_experts].item()
        row_route = row_route[first_row:end_row]
    else:  # keep the dropped routes' room rather than wait for the GPU to know how many they are
        rows = torch.arange(row_route.numel(), device=row_route.device)
        row_route = torch.where(rows < offsets[-1], row_route, -1)
    schedule = MoKSchedule(
        expert_offsets=offsets[first_expert : first_expert + num_local_experts + 1] - offsets[first_expert],
        row_route=row_route,
        route_row=route_row,
        route_rank=route_rank,
    )
    return add_travel(workspace, schedule, local_ids, num_experts)


def _gather_ids(workspace: MoKWorkspace, local_ids: Tensor) -> Tensor:
    """The expert of every route of every rank, `[ranks * num_local_tokens * K]`, -1 where a rank has fewer tokens."""
    if workspace.communicator.size == 1:
        return local_ids.flatten()
    padded = local_ids.new_full((workspace.num_local_tokens, workspace.topk), -1)
    padded[: local_ids.shape[0]] = local_ids
    return workspace.communicator.all_gather(padded).flatten()


def _check_capacity(workspace: MoKWorkspace, rank_offsets: Tensor) -> None:
    """All ranks see all counts, so all of them raise."""
    multiplier = workspace.config.schedule_capacity_multiplier
    if multiplier is None:
        return
    capacity = int(multiplier * workspace.num_local_tokens * workspace.topk)
    num_rows = rank_offsets.diff().tolist()
    if max(num_rows) > capacity:
        rank = num_rows.index(max(num_rows))
        raise ValueError(
            f"schedule_capacity_multiplier: expected at most {capacity} routed rows on a rank "
            f"({multiplier} * num_local_tokens {workspace.num_local_tokens} * topk {workspace.topk}), "
            f"got {num_rows[rank]} on rank {rank}"
        )


def add_travel(workspace: MoKWorkspace, schedule: MoKSchedule, local_ids: Tensor, num_experts: int) -> TorchSchedule:
    size, topk = workspace.communicator.size, workspace.topk
    if size == 1:
        return TorchSchedule(
            **vars(schedule),
            row_source=(schedule.row_route // topk).clamp(min=0),
            sent_token=schedule.row_route[:0],
            route_return=schedule.route_row,
            split_sizes=torch.zeros(2, 1, dtype=torch.int64),
        )
    ids = local_ids.flatten()
    kept_ids, sent_route = torch.where(ids < 0, num_experts, ids).sort(stable=True)
    sent_route = sent_route[kept_ids < num_experts]
    route_return = torch.full_like(ids, -1)
    route_return[sent_route] = torch.arange(sent_route.numel(), dtype=torch.int32, device=ids.device)
    row_rank = schedule.row_route // (workspace.num_local_tokens * topk)
    send_counts = torch.bincount(schedule.route_rank[local_ids >= 0], minlength=size)
    recv_counts = torch.bincount(row_rank, minlength=size)
    return TorchSchedule(
        **vars(schedule),
        row_source=_inverse(row_rank.sort(stable=True).indices),  # rows arrive by source rank, then in row order
        sent_token=(sent_route // topk).to(torch.int32),
        route_return=route_return.view_as(local_ids),
        split_sizes=torch.stack([send_counts, recv_counts]).cpu(),
    )


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty(permutation.shape, dtype=torch.int32, device=permutation.device)
    inverse[permutation] = torch.arange(permutation.numel(), dtype=torch.int32, device=permutation.device)
    return inverse


# Movement


def _dispatch(workspace: MoKWorkspace, schedule: TorchSchedule, per_token: Tensor) -> Tensor:
    """`[T, ...]` -> the tokens that arrived here; `row_source` points into them."""
    if workspace.communicator.size == 1:
        return per_token
    send_counts, recv_counts = schedule.split_sizes.tolist()
    return workspace.communicator.all_to_all_rows(
        per_token.index_select(0, schedule.sent_token), send_counts, recv_counts
    )


def _dispatch_weights(workspace: MoKWorkspace, schedule: TorchSchedule, router_weights: Tensor) -> Tensor:
    """`[T, K]` -> the router weight of each row, `[R]`."""
    flat = router_weights.reshape(-1)
    if workspace.communicator.size == 1:
        return flat.index_select(0, schedule.row_route.clamp(min=0))
    sent = flat.new_empty(schedule.sent_token.shape)
    kept = schedule.route_return.flatten() >= 0
    sent[schedule.route_return.flatten()[kept]] = flat[kept]
    send_counts, recv_counts = schedule.split_sizes.tolist()
    arrived = workspace.communicator.all_to_all_rows(sent, send_counts, recv_counts)
    return arrived.index_select(0, schedule.row_source)


def _return(workspace: MoKWorkspace, schedule: TorchSchedule, rows: Tensor) -> Tensor:
    """`[R, ...]` -> the results of this rank's own routes; `route_return` points into them."""
    if workspace.communicator.size == 1:
        return rows
    send_counts, recv_counts = schedule.split_sizes.tolist()
    by_source = torch.empty_like(rows).index_copy_(0, schedule.row_source.long(), rows)
    return workspace.communicator.all_to_all_rows(by_source, recv_counts, send_counts)


def _combine(
    returned: Tensor, route_return: Tensor, weights: Tensor | None, start: Tensor | None, like: Tensor
) -> Tensor:
    """start + sum over k of weights[:, k] * returned[route_return[:, k]], in that order, rounded once to the dtype of
    `like`."""
    dtype = _accumulate_dtype(like)
    total = torch.zeros(like.shape, dtype=dtype, device=like.device) if start is None else start.to(dtype, copy=True)
    if returned.shape[0] == 0:
        return total.to(like.dtype)
    dropped = route_return < 0
    any_dropped = dropped.is_cuda or bool(dropped.any())  # on a GPU, masking costs less than waiting for the answer
    for k in range(route_return.shape[1]):
        part = returned.index_select(0, route_return[:, k].clamp(min=0)).to(dtype)
        if weights is not None:
            part.mul_(weights[:, k, None])
        if any_dropped:
            part.masked_fill_(dropped[:, k, None], 0)
        total.add_(part)
    return total.to(like.dtype)


# Arithmetic


def _accumulate_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _sigmoid(gate: Tensor) -> Tensor:
    """On a CPU, torch.sigmoid and silu round differently in their vector and scalar code, so an element's bits depend
    on its place in the tensor; exp has one code for both."""
    return torch.sigmoid(gate) if gate.is_cuda else gate.neg().exp_().add_(1).reciprocal_()


def _clamped(gate_up: Tensor, swiglu_limit: float | None) -> tuple[Tensor, Tensor]:
    """`[n, 2I]` -> gate (at most the limit) and up (within +-limit), in the dtype of accumulation."""
    gate, up = gate_up.to(_accumulate_dtype(gate_up)).chunk(2, dim=-1)
    if swiglu_limit is None:
        return gate, up
    return gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)


def _swiglu(gate_up: Tensor, swiglu_limit: float | None) -> Tensor:
    """`a = silu(g) * u`: `[n, 2I]` -> `[n, I]`."""
    gate, up = _clamped(gate_up, swiglu_limit)
    return _sigmoid(gate).mul_(gate).mul_(up).to(gate_up.dtype)


def _swiglu_backward(
    gate_up: Tensor, projected: Tensor, row_weights: Tensor | None, swiglu_limit: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From `p = W_down^T dy` `[n, I]`: `w a` `[n, I]`, `dg` and `du` `[n, 2I]`, `dw = <p, a>` `[n]` (None without w).

    da = w p;  du = da silu(g);  dg = da u (sigmoid(g) + silu(g) - silu(g) sigmoid(g)); both zero outside the clamp
    and, as torch.clamp has it, not on its edge.
    """
    gate, up = _clamped(gate_up, swiglu_limit)
    sigmoid = _sigmoid(gate)
    silu = sigmoid * gate
    activation = silu * up
    d_activation = projected.to(silu.dtype)
    d_weights = None
    if row_weights is not None:
        d_weights = (d_activation * activation).sum(-1)
        d_activation = d_activation * row_weights[:, None]
        activation *= row_weights[:, None]
    d_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    d_gate, d_up = d_gate_up.chunk(2, dim=-1)
    torch.mul(d_activation, silu, out=d_up)
    slope = (silu * sigmoid).neg_().add_(silu).add_(sigmoid)
    torch.mul(slope.mul_(up), d_activation, out=d_gate)
    if swiglu_limit is not None:
        raw_gate, raw_up = gate_up.chunk(2, dim=-1)
        d_gate.masked_fill_(raw_gate > swiglu_limit, 0)
        d_up.masked_fill_(raw_up.abs() > swiglu_limit, 0)
    return activation.to(gate_up.dtype), d_gate_up, d_weights


def _matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """`out (+)= a b`, rounded once."""
    if out.data_ptr() % 64 and not out.is_cuda:
        # BLAS may round differently where the output is not aligned, which would depend on the other experts' rows.
        out.copy_(torch.addmm(out, a, b) if accumulate else torch.mm(a, b))
    elif accumulate:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _transposed_matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """`out (+)= a^T b` for weight gradients: a `[n, M]`, b `[n, N]`, out `[M, N]` of any floating dtype."""
    wide = torch.promote_types(a.dtype, out.dtype)
    if out.dtype == a.dtype:
        _matmul(a.t(), b, out, accumulate)
    elif wide == a.dtype or a.is_cuda:
        product = torch.mm(a.t(), b) if wide == a.dtype else torch.mm(a.t(), b, out_dtype=wide)
        out.add_(product) if accumulate else out.copy_(product)
    else:
        out.addmm_(a.t().to(wide), b.to(wide), beta=int(accumulate))


# One expert's MLP, or the shared one


class _Part(NamedTuple):
    """Some columns of `[n, 2I]`, and the weight or gradient `[..., columns, H]` that belongs to them."""

    columns: slice
    tensor: Tensor
    accumulate: bool = False  # gradients only: add to what is there


class _Mlp(NamedTuple):
    """Weights, or where their gradients go; of one expert (2-D tensors) or of all of this rank (3-D).

    gate_up: one part where gate and up lie together in memory, so that one matmul does for both, else two.
    """

    gate_up: list[_Part]
    down: _Part | None  # its columns are all of `[n, I]`
    is_mxfp8: bool = False

    def expert(self, index: int) -> _Mlp:
        gate_up = [part._replace(tensor=part.tensor[index]) for part in self.gate_up]
        return _Mlp(gate_up, self.down and self.down._replace(tensor=self.down.tensor[index]), self.is_mxfp8)

    def operand(self, activations: Tensor, contracted_dim: int) -> Tensor:
        """`activations` as a matmul that sums over `contracted_dim` reads them."""
        return mxfp8.round_trip(activations, contracted_dim) if self.is_mxfp8 else activations


def join_gate_up(gate: Tensor, up: Tensor) -> Tensor | None:
    """`[..., I, H]` twice -> one view `[..., 2I, H]` if they are the halves of such a tensor in memory, else None."""
    num_rows = gate.shape[-2]
    distance = up.storage_offset() - gate.storage_offset()
    together = (
        gate.dtype == up.dtype
        and gate.stride() == up.stride()
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and distance == num_rows * gate.stride(-2)
        and (gate.dim() == 2 or gate.shape[0] <= 1 or gate.stride(0) >= 2 * distance)
    )
    return gate.as_strided((*gate.shape[:-2], 2 * num_rows, gate.shape[-1]), gate.stride()) if together else None


def _weights(gate: Tensor, up: Tensor, down: Tensor | None) -> _Mlp:
    joined = join_gate_up(gate, up)
    width = gate.shape[-2]
    parts = [_Part(slice(0, width), gate), _Part(slice(width, 2 * width), up)]
    if joined is not None:
        parts = [_Part(slice(0, 2 * width), joined)]
    return _Mlp(parts, None if down is None else _Part(slice(0, width), down))


def _gradients(
    weights: Sequence[Tensor], main_grads: Sequence[Tensor | None], needs_grad: Sequence[bool]
) -> tuple[list[Tensor | None], _Mlp]:
    """For gate, up and down: the gradients to return (None where not wanted or added to a main gradient), not yet
    filled, and where to write all that are wanted."""
    gate, _, down = weights
    width = gate.shape[-2]
    fresh = [needed and main_grad is None for needed, main_grad in zip(needs_grad, main_grads, strict=True)]
    gate_up = gate.new_empty(*gate.shape[:-2], 2 * width, gate.shape[-1]) if fresh[0] or fresh[1] else None
    grads = [
        gate_up[..., :width, :] if gate_up is not None and fresh[0] else None,
        gate_up[..., width:, :] if gate_up is not None and fresh[1] else None,
        torch.empty_like(down, memory_format=torch.contiguous_format) if fresh[2] else None,
    ]
    columns = [slice(0, width), slice(width, 2 * width), slice(0, width)]
    parts = []
    for where, grad, main_grad, needed in zip(columns, grads, main_grads, needs_grad, strict=True):
        target = main_grad if grad is None else grad
        parts.append(_Part(where, target, grad is None) if needed and target is not None else None)
    gate_part, up_part, down_part = parts
    if gate_part and up_part and gate_part.accumulate == up_part.accumulate:
        joined = join_gate_up(gate_part.tensor, up_part.tensor)
        if joined is not None:
            gate_part, up_part = _Part(slice(0, 2 * width), joined, gate_part.accumulate), None
    return grads, _Mlp([part for part in (gate_part, up_part) if part], down_part)


def _forward_mlp(rows: Tensor, mlp: _Mlp, swiglu_limit: float | None, gate_up: Tensor, out: Tensor | None) -> None:
    """Fill `gate_up [n, 2I]` and, unless None, `out [n, H]` from `rows [n, H]`."""
    rows = mlp.operand(rows, 1)
    for columns, weight, _ in mlp.gate_up:
        _matmul(rows, weight.t(), gate_up[:, columns])
    if out is not None and mlp.down is not None:
        _matmul(mlp.operand(_swiglu(gate_up, swiglu_limit), 1), mlp.down.tensor.t(), out)


def _backward_mlp(
    rows: Tensor,
    d_out: Tensor,
    gate_up: Tensor,
    row_weights: Tensor | None,
    mlp: _Mlp,
    swiglu_limit: float | None,
    grads: _Mlp,
    d_rows: Tensor | None,
) -> Tensor | None:
    """Fill `grads` and, unless None, `d_rows [n, H]`; return `dw [n]` (None without w). d_out `[n, H]` has no w."""
    assert mlp.down is not None
    projected = torch.mm(mlp.operand(d_out, 1), mlp.down.tensor)
    activation, d_gate_up, d_weights = _swiglu_backward(gate_up, projected, row_weights, swiglu_limit)
    if grads.down is not None:
        a, b = mlp.operand(d_out, 0), mlp.operand(activation, 0)
        _transposed_matmul(a, b, grads.down.tensor, grads.down.accumulate)
    if grads.gate_up:
        a, b = mlp.operand(d_gate_up, 0), mlp.operand(rows, 0)
        for columns, grad, accumulate in grads.gate_up:
            _transposed_matmul(a[:, columns], b, grad, accumulate)
    if d_rows is not None:
        a = mlp.operand(d_gate_up, 1)
        for index, (columns, weight, _) in enumerate(mlp.gate_up):
            _matmul(a[:, columns], weight, d_rows, accumulate=index > 0)
    return d_weights


def _zero(grads: _Mlp) -> None:
    """An expert without rows has a gradient of zero."""
    for part in (*grads.gate_up, *([grads.down] if grads.down else [])):
        if not part.accumulate:
            part.tensor.zero_()


# All routed experts of this rank: one after the other, or by torch's grouped matmul where that is fast. The grouped way
# never waits for the GPU, so it may see rows past the last one, with any content; nothing reads what comes of them.


def _can_group(mlp: _Mlp) -> bool:
    """Whether torch has a grouped matmul for these weights that does not run expert by expert, and they are aligned."""
    weights = [part.tensor for part in (*mlp.gate_up, *([mlp.down] if mlp.down else []))]
    return not mlp.is_mxfp8 and all(
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        and weight.data_ptr() % 16 == 0
        and weight.stride(-1) == 1
        and all(size % 8 == 0 for size in (*weight.shape[1:], *weight.stride()[:2]))
        for weight in weights
    )


def _forward_routed(
    arrived: Tensor, schedule: TorchSchedule, mlp: _Mlp, swiglu_limit: float | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """`gate_up [R, 2I]` (only if `keep`) and, if there is a down projection, the unweighted results `[R, H]`."""
    if _can_group(mlp):
        gate_up, out = _forward_grouped(arrived.index_select(0, schedule.row_source), schedule, mlp, swiglu_limit)
        return gate_up if keep else gate_up[:0], out
    num_rows, width = schedule.row_source.numel(), sum(part.tensor.shape[-2] for part in mlp.gate_up)
    bounds = schedule.expert_offsets.tolist()
    most = max(end - start for start, end in pairwise(bounds))
    gate_up = arrived.new_empty(num_rows if keep else most, width)
    out = arrived.new_empty(num_rows, arrived.shape[1]) if mlp.down is not None else None
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        rows = arrived.index_select(0, schedule.row_source[start:end])
        into = gate_up[start:end] if keep else gate_up[: end - start]
        _forward_mlp(rows, mlp.expert(expert), swiglu_limit, into, None if out is None else out[start:end])
    return gate_up if keep else gate_up[:0], out


def _backward_routed(
    arrived: Tensor,
    arrived_d_out: Tensor,
    gate_up: Tensor,
    row_weights: Tensor,
    schedule: TorchSchedule,
    mlp: _Mlp,
    swiglu_limit: float | None,
    grads: _Mlp,
    needs_d_rows: bool,
) -> tuple[Tensor | None, Tensor]:
    """Fill `grads`; return `d_rows [R, H]` (None unless needed) and `dw [R]`."""
    if _can_group(mlp):
        rows = arrived.index_select(0, schedule.row_source) if grads.gate_up else arrived
        d_out = arrived_d_out.index_select(0, schedule.row_source)
        return _backward_grouped(rows, d_out, gate_up, row_weights, schedule, mlp, swiglu_limit, grads, needs_d_rows)
    d_rows = arrived_d_out.new_empty(gate_up.shape[0], arrived_d_out.shape[1]) if needs_d_rows else None
    d_weights = torch.empty_like(row_weights)
    for expert, (start, end) in enumerate(pairwise(schedule.expert_offsets.tolist())):
        if start == end:
            _zero(grads.expert(expert))
            continue
        source = schedule.row_source[start:end]
        dw = _backward_mlp(
            arrived.index_select(0, source) if grads.gate_up else arrived,
            arrived_d_out.index_select(0, source),
            gate_up[start:end],
            row_weights[start:end],
            mlp.expert(expert),
            swiglu_limit,
            grads.expert(expert),
            None if d_rows is None else d_rows[start:end],
        )
        assert dw is not None
        d_weights[start:end] = dw
    return d_rows, d_weights


def _grouped_matmul(a: Tensor, b: Tensor, schedule: TorchSchedule) -> Tensor:
    """`[R, M]` by `[E_l, M, N]` -> `[R, N]`, or `[M, R]` by `[R, N]` -> `[E_l, M, N]`."""
    return torch.nn.functional.grouped_mm(a, b, offs=schedule.expert_offsets[1:])


def _forward_grouped(
    rows: Tensor, schedule: TorchSchedule, mlp: _Mlp, swiglu_limit: float | None
) -> tuple[Tensor, Tensor | None]:
    parts = [_grouped_matmul(rows, part.tensor.mT, schedule) for part in mlp.gate_up]
    gate_up = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if mlp.down is None:
        return gate_up, None
    return gate_up, _grouped_matmul(_swiglu(gate_up, swiglu_limit), mlp.down.tensor.mT, schedule)


def _backward_grouped(
    rows: Tensor,
    d_out: Tensor,
    gate_up: Tensor,
    row_weights: Tensor,
    schedule: TorchSchedule,
    mlp: _Mlp,
    swiglu_limit: float | None,
    grads: _Mlp,
    needs_d_rows: bool,
) -> tuple[Tensor | None, Tensor]:
    assert mlp.down is not None
    projected = _grouped_matmul(d_out, mlp.down.tensor, schedule)
    activation, d_gate_up, d_weights = _swiglu_backward(gate_up, projected, row_weights, swiglu_limit)
    assert d_weights is not None
    products = [(part, d_gate_up[:, part.columns], rows) for part in grads.gate_up]
    if grads.down is not None:
        products.append((grads.down, d_out, activation))
    for part, a, b in products:
        product = _grouped_matmul(a.t(), b, schedule)
        part.tensor.add_(product) if part.accumulate else part.tensor.copy_(product)
    if not needs_d_rows:
        return None, d_weights
    d_rows = [_grouped_matmul(d_gate_up[:, part.columns], part.tensor, schedule) for part in mlp.gate_up]
    return d_rows[0] if len(d_rows) == 1 else d_rows[0].float().add_(d_rows[1]).to(rows.dtype), d_weights


# The interface of a backend


def _routed_mlp(weights: ExpertWeights, dtype: torch.dtype, *, in_backward: bool) -> tuple[_Mlp, list[Tensor]]:
    """Also the weights one by one. MXFP8 weights come as tensors of `dtype`, which holds their values exactly."""
    routed = [
        mxfp8.expand_weight(weight, dtype, in_backward=in_backward) if isinstance(weight, tuple) else weight
        for weight in weights[3:]
        if weight is not None
    ]
    is_mxfp8 = isinstance(weights.routed_gate, tuple)
    if is_mxfp8:
        routed[:2] = torch.cat(routed[:2], dim=1).chunk(2, dim=1)
    gate, up, *down = routed
    return _weights(gate, up, down[0] if down else None)._replace(is_mxfp8=is_mxfp8), routed


def _padded(tokens: Tensor) -> Tensor:
    """With zero rows, up to a multiple of 16: BLAS has other kernels for odd row counts, and then the bits of a token
    would depend on how many tokens its rank has."""
    return torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[0] % 16))


def _forward_shared(x: Tensor, weights: ExpertWeights, swiglu_limit: float | None) -> tuple[Tensor, Tensor | None]:
    """`shared_gate_up [T, 2*I_s]` and the shared expert's output `[T, H]`; empty and None without one."""
    if weights.shared_gate is None or weights.shared_up is None:
        return x.new_empty(0), None
    mlp = _weights(weights.shared_gate, weights.shared_up, weights.shared_down)
    rows = _padded(x)
    gate_up = x.new_empty(rows.shape[0], 2 * weights.shared_gate.shape[0])
    out = torch.empty_like(rows) if mlp.down is not None else None
    _forward_mlp(rows, mlp, swiglu_limit, gate_up, out)
    return gate_up[: x.shape[0]], None if out is None else out[: x.shape[0]]


def forward(
    workspace: MoKWorkspace,
    schedule: TorchSchedule,
    x: Tensor,
    router_weights: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    save_for_backward: bool,
) -> tuple[Tensor, MoKForwardContext]:
    arrived = _dispatch(workspace, schedule, x)
    mlp, _ = _routed_mlp(weights, x.dtype, in_backward=False)
    gate_up, rows = _forward_routed(arrived, schedule, mlp, swiglu_limit, save_for_backward)
    assert rows is not None
    shared_gate_up, shared = _forward_shared(x, weights, swiglu_limit)
    returned = _return(workspace, schedule, rows)
    output = _combine(returned, schedule.route_return, router_weights, shared, x)
    return output, MoKForwardContext(gate_up, shared_gate_up if save_for_backward else shared_gate_up[:0])


def recompute_forward_context(
    workspace: MoKWorkspace, schedule: TorchSchedule, x: Tensor, weights: ExpertWeights, swiglu_limit: float | None
) -> MoKForwardContext:
    arrived = _dispatch(workspace, schedule, x)
    mlp, _ = _routed_mlp(weights, x.dtype, in_backward=False)
    gate_up, _ = _forward_routed(arrived, schedule, mlp, swiglu_limit, True)
    return MoKForwardContext(gate_up, _forward_shared(x, weights, swiglu_limit)[0])


def backward(
    workspace: MoKWorkspace,
    schedule: TorchSchedule,
    context: MoKForwardContext,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    main_grads: MainGrads,
    needs_grad: NeedsGrad,
) -> MoKGradients:
    d_shared, shared_grads = _backward_shared(
        context.shared_gate_up, grad_output, x, weights, swiglu_limit, main_grads[:3], needs_grad
    )
    mlp, routed = _routed_mlp(weights, x.dtype, in_backward=True)
    routed_grads, into = _gradients(routed, main_grads[3:], needs_grad[2:5])
    d_x = d_router_weights = None
    if any(needs_grad[:5]):
        d_rows, d_row_weights = _backward_routed(
            _dispatch(workspace, schedule, x) if any(needs_grad[2:4]) else x,
            _dispatch(workspace, schedule, grad_output),
            context.gate_up,
            _dispatch_weights(workspace, schedule, router_weights),
            schedule,
            mlp,
            swiglu_limit,
            into,
            needs_grad.x,
        )
        if d_rows is not None:
            d_x = _combine(_return(workspace, schedule, d_rows), schedule.route_return, None, d_shared, x)
        if needs_grad.router_weights:
            d_router_weights = _route_values(_return(workspace, schedule, d_row_weights), schedule.route_return)
    return MoKGradients(d_x, d_router_weights, *routed_grads, *shared_grads)


def _route_values(returned: Tensor, route_return: Tensor) -> Tensor:
    """One value per returned route -> `[T, K]`, zero where dropped."""
    if returned.shape[0] == 0:
        return returned.new_zeros(route_return.shape)
    values = returned.index_select(0, route_return.flatten().clamp(min=0)).view(route_return.shape)
    return values.masked_fill_(route_return < 0, 0)


def _backward_shared(
    gate_up: Tensor,
    grad_output: Tensor,
    x: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    main_grads: Sequence[Tensor | None],
    needs_grad: NeedsGrad,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The shared expert's part of d_x `[T, H]` and its three weight gradients."""
    shared = [weight for weight in weights[:3] if isinstance(weight, Tensor)]
    if not shared or not (needs_grad.x or any(needs_grad[5:])):
        return None, [None] * 3
    grads, into = _gradients(shared, main_grads, needs_grad[5:])
    rows = _padded(x)
    d_rows = torch.empty_like(rows) if needs_grad.x else None
    mlp = _weights(*shared)
    _backward_mlp(rows, _padded(grad_output), _padded(gate_up), None, mlp, swiglu_limit, into, d_rows)
    return None if d_rows is None else d_rows[: x.shape[0]], grads
