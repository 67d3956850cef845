"""The backend that runs anywhere: routes sorted by expert, one matmul per expert, collectives of torch.distributed.

Gradients are the formulas of the design, written out; autograd takes no part. Every sum has a fixed order, so that the
result has the same bits for every expert-parallel size: given the same number of CPU threads and, with a shared expert,
sizes that are multiples of 8 (on a GPU its matmuls are cuBLAS's, whose choice of kernel depends on T).
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
    NO_LORA,
    ExpertWeights,
    LoraFactors,
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


# The caller checks the ids.
REPORTS_BAD_EXPERT_IDS = False
SUPPORTS_LORA = True


def check(workspace: MoKWorkspace) -> None:
    """Wait for the device, which surfaces its errors."""
    if workspace.device.type == "cuda":
        torch.cuda.synchronize(workspace.device)


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


def _arrive(workspace: MoKWorkspace, schedule: TorchSchedule, tokens: Tensor) -> Tensor:
    """`[T, ...]` on each rank -> the token of each row here, `[R, ...]`."""
    if workspace.communicator.size > 1:
        send_counts, recv_counts = schedule.split_sizes.tolist()
        sent = tokens.index_select(0, schedule.sent_token)
        tokens = workspace.communicator.all_to_all_rows(sent, send_counts, recv_counts)
    return tokens.index_select(0, schedule.row_source)


def _arrive_weights(workspace: MoKWorkspace, schedule: TorchSchedule, router_weights: Tensor) -> Tensor:
    """`[T, K]` on each rank -> the router weight of each row here, `[R]`."""
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
        part = returned.index_select(0, route_return[:, k].clamp(min=0))
        if any_dropped:
            part.masked_fill_(dropped[:, k, None], 0)
        if weights is None:
            total.add_(part)
        else:
            total.addcmul_(part.to(dtype), weights[:, k, None])
    return total.to(like.dtype)


# Arithmetic


def _accumulate_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _sigmoid(gate: Tensor) -> Tensor:
    """On a CPU, torch.sigmoid and silu round differently in their vector and scalar code, so an element's bits depend
    on its place in the tensor; exp has one code for both."""
    return torch.sigmoid(gate) if gate.is_cuda else gate.neg().exp_().add_(1).reciprocal_()


def _clamped(gate_up: Tensor, swiglu_limit: float | None) -> tuple[Tensor, Tensor]:
    """`[n, 2I]` -> gate, in the dtype of accumulation, and up; gate at most the limit, up within +- the limit."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.to(_accumulate_dtype(gate))
    if swiglu_limit is None:
        return gate, up
    return gate.clamp(max=swiglu_limit), up.to(gate.dtype).clamp(-swiglu_limit, swiglu_limit)


def _swiglu(gate_up: Tensor, swiglu_limit: float | None) -> Tensor:
    """`a = silu(g) * u`: `[n, 2I]` -> `[n, I]`."""
    gate, up = _clamped(gate_up, swiglu_limit)
    activation = gate_up.new_empty(gate.shape)
    return torch.mul(_sigmoid(gate).mul_(gate), up, out=activation)


def _swiglu_backward(
    gate_up: Tensor, projected: Tensor, row_weights: Tensor | None, swiglu_limit: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From `p = W_down^T dy` `[n, I]`: `w a` `[n, I]`, `dg` and `du` `[n, 2I]`, `dw = <p, a>` `[n]` (None without w).

    da = w p;  du = da silu(g);  dg = da u (sigmoid(g) + silu(g) (1 - sigmoid(g))); both zero outside the clamp
    and, as torch.clamp has it, not on its edge. Only the results are rounded to the dtype of gate_up.
    """
    gate, up = _clamped(gate_up, swiglu_limit)
    sigmoid = _sigmoid(gate)
    silu = sigmoid * gate
    activation, d_activation, d_weights = silu * up, projected, None
    if row_weights is not None:
        d_weights = (activation * projected).sum(-1)
        d_activation = projected * row_weights[:, None]
        activation *= row_weights[:, None]
    d_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    d_gate, d_up = d_gate_up.chunk(2, dim=-1)
    torch.mul(d_activation, silu, out=d_up)
    slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
    torch.mul(slope.mul_(up), d_activation, out=d_gate)
    if swiglu_limit is not None:
        raw_gate, raw_up = gate_up.chunk(2, dim=-1)
        d_gate.masked_fill_(raw_gate > gate, 0)
        d_up.masked_fill_(raw_up.abs() > up.abs(), 0)
    return activation.to(gate_up.dtype), d_gate_up, d_weights


def _matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """`out (+)= a b`, rounded once."""
    a, b = _aligned(a), _aligned(b)
    target = _aligned(out)
    torch.addmm(target, a, b, out=target) if accumulate else torch.mm(a, b, out=target)
    if target is not out:
        out.copy_(target)


def _aligned(tensor: Tensor) -> Tensor:
    """A copy unless it starts on a cache line. On a CPU, BLAS may round differently where it does not, and where one
    expert's rows start depends on how many the others have."""
    return tensor if tensor.is_cuda or tensor.data_ptr() % 64 == 0 else tensor.clone()


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


# The MLPs of the routed experts; the shared expert is the one expert of a group that has all tokens


class _Part(NamedTuple):
    """Some columns of `[n, 2I]`, and the weights `[E_l, columns, H]` that belong to them."""

    columns: slice
    weights: Tensor


class _Mlp(NamedTuple):
    """gate_up: one part where gate and up lie together in memory, so that one matmul does for both, else two.
    down: `[E_l, H, I]`, None where only the context is computed. lora: adapters of both."""

    gate_up: list[_Part]
    down: Tensor | None
    is_mxfp8: bool = False
    lora: LoraFactors = NO_LORA

    def operand(self, activations: Tensor, contracted_dim: int) -> Tensor:
        """`activations` as a matmul that sums over `contracted_dim` reads them."""
        return mxfp8.round_trip(activations, contracted_dim) if self.is_mxfp8 else activations


class _Groups(NamedTuple):
    """Which rows belong to which expert: on the device for torch's grouped matmul, which need not wait for the GPU (and
    may meet rows past the last one, with any content; nothing reads what comes of them), or on the host."""

    offsets: Tensor | None
    bounds: list[int] | None


def _groups(schedule: TorchSchedule, mlp: _Mlp) -> _Groups:
    if _can_group(mlp):
        return _Groups(schedule.expert_offsets[1:], None)
    return _Groups(None, schedule.expert_offsets.tolist())


def _can_group(mlp: _Mlp) -> bool:
    """Whether torch has a grouped matmul for these weights that does not run expert by expert, and they are aligned."""
    weights = [part.weights for part in mlp.gate_up] + ([] if mlp.down is None else [mlp.down])
    weights += [factor for factor in mlp.lora if factor is not None]
    return not mlp.is_mxfp8 and all(
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        and weight.data_ptr() % 16 == 0
        and weight.stride(-1) == 1
        and all(size % 8 == 0 for size in (*weight.shape[1:], *weight.stride()[:2]))
        for weight in weights
    )


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


def _mlp_of(gate: Tensor, up: Tensor, down: Tensor | None = None) -> _Mlp:
    joined = join_gate_up(gate, up)
    width = gate.shape[-2]
    if joined is not None:
        return _Mlp([_Part(slice(0, 2 * width), joined)], down)
    return _Mlp([_Part(slice(0, width), gate), _Part(slice(width, 2 * width), up)], down)


def _matmul_rows(groups: _Groups, rows: Tensor, weights: Tensor) -> Tensor:
    """Each expert's rows times its weights: `[R, M]` by `[E_l, M, N]` -> `[R, N]`."""
    if groups.bounds is None:
        return torch.nn.functional.grouped_mm(rows, weights, offs=groups.offsets)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, (start, end) in enumerate(pairwise(groups.bounds)):
        if start < end:
            _matmul(rows[start:end], weights[expert], out[start:end])
    return out


def _add_low_rank(groups: _Groups, out: Tensor, rows: Tensor, first: Tensor | None, second: Tensor | None) -> None:
    """`out += rows first second`, `[R, M]` by `[E_l, M, r]` by `[E_l, r, N]`; nothing without an adapter."""
    if first is not None and second is not None:
        out.add_(_matmul_rows(groups, _matmul_rows(groups, rows, first), second))


def _mT(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.mT


def _low_rank_gradients(
    groups: _Groups,
    d_out: Tensor,
    rows: Tensor,
    mlp: _Mlp,
    factors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
) -> None:
    """Of `out = B A rows`: `dA += (d_out B)^T rows` and `dB += d_out^T (rows A^T)`, where there is a buffer for it."""
    (lora_A, lora_B), (d_A, d_B) = factors, grads
    if lora_B is not None and d_A is not None:
        _weight_gradient(groups, _matmul_rows(groups, d_out, lora_B), rows, mlp, d_A)
    if lora_A is not None and d_B is not None:
        _weight_gradient(groups, d_out, _matmul_rows(groups, rows, lora_A.mT), mlp, d_B)


def _weight_gradient(groups: _Groups, a: Tensor, b: Tensor, mlp: _Mlp, main_grad: Tensor | None) -> Tensor | None:
    """The sum over each expert's rows of their outer products, `[R, M]` by `[R, N]` -> `[E_l, M, N]`.

    Added to `main_grad`, and then None, if there is one.
    """
    if groups.bounds is None:
        product = torch.nn.functional.grouped_mm(a.t(), b, offs=groups.offsets)
        if main_grad is None:
            return product
        main_grad.add_(product)
        return None
    grad = a.new_empty(len(groups.bounds) - 1, a.shape[1], b.shape[1]) if main_grad is None else main_grad
    for expert, (start, end) in enumerate(pairwise(groups.bounds)):
        if start < end:
            a_rows, b_rows = mlp.operand(a[start:end], 0), mlp.operand(b[start:end], 0)
            _transposed_matmul(a_rows, b_rows, grad[expert], accumulate=main_grad is not None)
        elif main_grad is None:
            grad[expert].zero_()
    return grad if main_grad is None else None


def _gate_up_gradients(
    groups: _Groups,
    d_gate_up: Tensor,
    rows: Tensor,
    mlp: _Mlp,
    main_grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Of gate and up, in one matmul where both can be written at once (then the results are halves of one tensor)."""
    gate, up = main_grads
    if all(needs_grad) and (gate is None) is (up is None):
        joined = None if gate is None or up is None else join_gate_up(gate, up)
        if joined is not None or gate is None:
            both = _weight_gradient(groups, d_gate_up, rows, mlp, joined)
            if both is None:
                return None, None
            d_gate, d_up = both.chunk(2, dim=1)
            return d_gate, d_up
    d_gate, d_up = d_gate_up.chunk(2, dim=1)
    return (
        _weight_gradient(groups, d_gate, rows, mlp, gate) if needs_grad[0] else None,
        _weight_gradient(groups, d_up, rows, mlp, up) if needs_grad[1] else None,
    )


def _forward_mlp(rows: Tensor, groups: _Groups, mlp: _Mlp, swiglu_limit: float | None) -> tuple[Tensor, Tensor | None]:
    """`gate_up [R, 2I]` and, if there is a down projection, the results `[R, H]` without router weights."""
    rows = mlp.operand(rows, 1)
    parts = [_matmul_rows(groups, rows, part.weights.mT) for part in mlp.gate_up]
    gate_up = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    _add_low_rank(groups, gate_up, rows, _mT(mlp.lora.gate_up_A), _mT(mlp.lora.gate_up_B))
    if mlp.down is None:
        return gate_up, None
    activation = mlp.operand(_swiglu(gate_up, swiglu_limit), 1)
    out = _matmul_rows(groups, activation, mlp.down.mT)
    _add_low_rank(groups, out, activation, _mT(mlp.lora.down_A), _mT(mlp.lora.down_B))
    return gate_up, out


class _MlpGradients(NamedTuple):
    rows: Tensor | None = None
    row_weights: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None


def _backward_mlp(
    rows: Tensor,
    d_out: Tensor,
    gate_up: Tensor,
    row_weights: Tensor | None,
    groups: _Groups,
    mlp: _Mlp,
    swiglu_limit: float | None,
    main_grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    lora_grads: LoraFactors = NO_LORA,
) -> _MlpGradients:
    """main_grads: of gate, up and down. needs_grad: of rows, gate, up and down. `d_out [R, H]` has no weights yet."""
    assert mlp.down is not None
    needs_rows, *needs_gate_up, needs_down = needs_grad
    projected = _matmul_rows(groups, mlp.operand(d_out, 1), mlp.down)
    _add_low_rank(groups, projected, d_out, mlp.lora.down_B, mlp.lora.down_A)
    activation, d_gate_up, d_weights = _swiglu_backward(gate_up, projected, row_weights, swiglu_limit)
    d_gate, d_up = _gate_up_gradients(groups, d_gate_up, rows, mlp, main_grads[:2], needs_gate_up)
    d_down = _weight_gradient(groups, d_out, activation, mlp, main_grads[2]) if needs_down else None
    _low_rank_gradients(groups, d_gate_up, rows, mlp, mlp.lora[:2], lora_grads[:2])
    _low_rank_gradients(groups, d_out, activation, mlp, mlp.lora[2:], lora_grads[2:])
    d_rows = None
    if needs_rows:
        d_gate_up = mlp.operand(d_gate_up, 1)
        parts = [_matmul_rows(groups, d_gate_up[:, part.columns], part.weights) for part in mlp.gate_up]
        d_rows = parts[0] if len(parts) == 1 else parts[0].to(_accumulate_dtype(rows)).add_(parts[1]).to(rows.dtype)
        _add_low_rank(groups, d_rows, d_gate_up, mlp.lora.gate_up_B, mlp.lora.gate_up_A)
    return _MlpGradients(d_rows, d_weights, d_gate, d_up, d_down)


# The interface of a backend


def _routed_mlp(weights: ExpertWeights, dtype: torch.dtype, *, in_backward: bool) -> _Mlp:
    """MXFP8 weights come as tensors of `dtype`, which holds their values exactly."""
    routed = [
        mxfp8.expand_weight(weight, dtype, in_backward=in_backward) if isinstance(weight, tuple) else weight
        for weight in weights[3:]
        if weight is not None
    ]
    is_mxfp8 = isinstance(weights.routed_gate, tuple)
    if is_mxfp8:
        routed[:2] = torch.cat(routed[:2], dim=1).chunk(2, dim=1)
    return _mlp_of(*routed)._replace(is_mxfp8=is_mxfp8)


def _forward_routed(
    workspace: MoKWorkspace,
    schedule: TorchSchedule,
    x: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    lora: LoraFactors,
) -> tuple[Tensor, Tensor | None]:
    mlp = _routed_mlp(weights, x.dtype, in_backward=False)._replace(lora=lora)
    return _forward_mlp(_arrive(workspace, schedule, x), _groups(schedule, mlp), mlp, swiglu_limit)


def _padded(tokens: Tensor) -> Tensor:
    """With zero rows, up to a multiple of 16: BLAS has other kernels for odd row counts, and then the bits of a token
    would depend on how many tokens its rank has."""
    return torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[0] % 16))


def _shared_mlp(weights: ExpertWeights) -> _Mlp | None:
    """One expert, its weights `[1, ...]`; None without a shared expert."""
    shared = [weight[None] for weight in weights[:3] if isinstance(weight, Tensor)]
    return _mlp_of(*shared) if shared else None


def _forward_shared(x: Tensor, weights: ExpertWeights, swiglu_limit: float | None) -> tuple[Tensor, Tensor | None]:
    """`shared_gate_up [T, 2*I_s]` and the shared expert's output `[T, H]`; empty and None without one."""
    mlp = _shared_mlp(weights)
    if mlp is None:
        return x.new_empty(0), None
    rows = _padded(x)
    gate_up, out = _forward_mlp(rows, _Groups(None, [0, rows.shape[0]]), mlp, swiglu_limit)
    return gate_up[: x.shape[0]], None if out is None else out[: x.shape[0]]


def forward(
    workspace: MoKWorkspace,
    schedule: TorchSchedule,
    x: Tensor,
    router_weights: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    save_for_backward: bool,
    lora: LoraFactors = NO_LORA,
) -> tuple[Tensor, MoKForwardContext]:
    gate_up, out = _forward_routed(workspace, schedule, x, weights, swiglu_limit, lora)
    assert out is not None
    shared_gate_up, shared = _forward_shared(x, weights, swiglu_limit)
    output = _combine(_return(workspace, schedule, out), schedule.route_return, router_weights, shared, x)
    context = (gate_up, shared_gate_up) if save_for_backward else (x.new_empty(0), x.new_empty(0))
    return output, MoKForwardContext(*context)


def recompute_forward_context(
    workspace: MoKWorkspace,
    schedule: TorchSchedule,
    x: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    lora: LoraFactors = NO_LORA,
) -> MoKForwardContext:
    gate_up, _ = _forward_routed(workspace, schedule, x, weights, swiglu_limit, lora)
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
    lora: LoraFactors = NO_LORA,
    lora_grads: LoraFactors = NO_LORA,
) -> MoKGradients:
    needs_shared, needs_routed = (needs_grad.x, *needs_grad[5:]), (needs_grad.x, *needs_grad[2:5])
    shared = _backward_shared(
        context.shared_gate_up, grad_output, x, weights, swiglu_limit, main_grads[:3], needs_shared
    )
    routed, d_x, d_router_weights = _MlpGradients(), None, None
    needs_lora = [grad is not None for grad in lora_grads]
    if needs_grad.router_weights or any(needs_routed) or any(needs_lora):
        mlp = _routed_mlp(weights, x.dtype, in_backward=True)._replace(lora=lora)
        routed = _backward_mlp(
            _arrive(workspace, schedule, x) if any(needs_routed[1:3]) or any(needs_lora[:2]) else x,
            _arrive(workspace, schedule, grad_output),
            context.gate_up,
            _arrive_weights(workspace, schedule, router_weights),
            _groups(schedule, mlp),
            mlp,
            swiglu_limit,
            main_grads[3:],
            needs_routed,
            lora_grads,
        )
    if routed.rows is not None:
        d_x = _combine(_return(workspace, schedule, routed.rows), schedule.route_return, None, shared.rows, x)
    if needs_grad.router_weights and routed.row_weights is not None:
        d_router_weights = _route_values(_return(workspace, schedule, routed.row_weights), schedule.route_return)
    return MoKGradients(d_x, d_router_weights, *routed[2:], *shared[2:])


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
    needs_grad: Sequence[bool],
) -> _MlpGradients:
    """The shared expert's part of d_x `[T, H]` and its three weight gradients."""
    mlp = _shared_mlp(weights)
    if mlp is None or not any(needs_grad):
        return _MlpGradients()
    main_grads = [grad if grad is None else grad[None] for grad in main_grads]
    rows, d_out = _padded(x), _padded(grad_output)
    groups = _Groups(None, [0, rows.shape[0]])
    grads = _backward_mlp(rows, d_out, _padded(gate_up), None, groups, mlp, swiglu_limit, main_grads, needs_grad)
    d_x = None if grads.rows is None else grads.rows[: x.shape[0]]
    return _MlpGradients(d_x, None, *[grad if grad is None else grad[0] for grad in grads[2:]])
