"""What every function of `mok.functional` means, one route at a time: the oracle of the tests, not for use.

One process, the whole batch, one floating dtype (float64 in most tests), MXFP8 for routed weights if wanted. Signatures
are those of `mok.functional` without `config` and `workspace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mok import mxfp8
from mok._types import LoraFactors, MoKForwardContext, MoKGradients, MoKSchedule, Weight


def build_schedule(
    top_experts: Sequence[Tensor], *, num_local_experts: int, num_local_tokens: int
) -> list[MoKSchedule]:
    """The schedule of every rank from the `[T, K]` ids of every rank. `num_local_tokens`: a workspace's capacity."""
    num_ranks, topk = len(top_experts), top_experts[0].shape[1]
    route_row = [torch.full(ids.shape, -1, dtype=torch.int32) for ids in top_experts]
    route_rank = [torch.full(ids.shape, -1, dtype=torch.int32) for ids in top_experts]
    schedules = []
    for owner in range(num_ranks):
        offsets, row_route = [0], list[int]()
        for expert in range(owner * num_local_experts, (owner + 1) * num_local_experts):
            for source, ids in enumerate(top_experts):
                for token, k in (ids == expert).nonzero().tolist():  # in (token, k) order
                    route_row[source][token, k] = len(row_route)
                    route_rank[source][token, k] = owner
                    row_route.append((source * num_local_tokens + token) * topk + k)
            offsets.append(len(row_route))
        as_int32 = [torch.tensor(values, dtype=torch.int32) for values in (offsets, row_route)]
        schedules.append(MoKSchedule(as_int32[0], as_int32[1], route_row[owner], route_rank[owner]))
    return schedules


def forward(
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    routed_gate: Weight,
    routed_up: Weight,
    routed_down: Weight,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    context = recompute_forward_context(schedule, x, shared_gate, shared_up, routed_gate, routed_up, swiglu_limit)
    read, (down,) = _reader(x.dtype, [routed_down], in_backward=False)
    output = torch.zeros_like(x)
    if shared_down is not None:
        for token, gate_up in enumerate(context.shared_gate_up):
            output[token] += shared_down @ _activation(gate_up, swiglu_limit)
    for row, expert, token, k in _rows(schedule):
        activation = read(_activation(context.gate_up[row], swiglu_limit)[None], 1)[0]
        output[token] += router_weights[token, k] * (down[expert] @ activation)
    return output, context


def recompute_forward_context(
    schedule: MoKSchedule,
    x: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    routed_gate: Weight,
    routed_up: Weight,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """g and u do not depend on `swiglu_limit`: they are kept as they were before the clamp."""
    read, (gate, up) = _reader(x.dtype, [routed_gate, routed_up], in_backward=False)
    gate_up = x.new_empty(schedule.row_route.numel(), 2 * gate.shape[1])
    for row, expert, token, _ in _rows(schedule):
        token_x = read(x[token][None], 1)[0]
        gate_up[row] = torch.cat([gate[expert] @ token_x, up[expert] @ token_x])
    if shared_gate is None or shared_up is None:
        return MoKForwardContext(gate_up, x.new_empty(0))
    return MoKForwardContext(gate_up, torch.cat([x @ shared_gate.t(), x @ shared_up.t()], dim=1))


def backward(
    schedule: MoKSchedule,
    context: MoKForwardContext,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    routed_gate: Weight,
    routed_up: Weight,
    routed_down: Weight,
    swiglu_limit: float | None = None,
) -> MoKGradients:
    read, (gate, up, down) = _reader(x.dtype, [routed_gate, routed_up, routed_down], in_backward=True)
    d_x, d_router_weights = torch.zeros_like(x), torch.zeros_like(router_weights)
    d_gate, d_up, d_down = (torch.zeros_like(weight) for weight in (gate, up, down))
    weighted, d_gate_rows, d_up_rows = (x.new_zeros(schedule.row_route.numel(), gate.shape[1]) for _ in range(3))
    for row, expert, token, k in _rows(schedule):
        weight = router_weights[token, k]
        activation = _activation(context.gate_up[row], swiglu_limit)
        projected = down[expert].t() @ read(grad_output[token][None], 1)[0]
        d_router_weights[token, k] = projected @ activation
        dg, du = _activation_backward(context.gate_up[row], weight * projected, swiglu_limit)
        weighted[row], d_gate_rows[row], d_up_rows[row] = weight * activation, dg, du
        d_x[token] += gate[expert].t() @ read(dg[None], 1)[0] + up[expert].t() @ read(du[None], 1)[0]
    token_of_row = schedule.row_route.long() // router_weights.shape[1]
    for expert in range(len(gate)):
        rows = slice(*schedule.expert_offsets[expert : expert + 2].tolist())
        x_rows, dy_rows = read(x[token_of_row[rows]], 0), read(grad_output[token_of_row[rows]], 0)
        d_gate[expert] = read(d_gate_rows[rows], 0).t() @ x_rows
        d_up[expert] = read(d_up_rows[rows], 0).t() @ x_rows
        d_down[expert] = dy_rows.t() @ read(weighted[rows], 0)
    if shared_gate is None or shared_up is None or shared_down is None:
        return MoKGradients(d_x, d_router_weights, d_gate, d_up, d_down, None, None, None)
    d_shared_gate, d_shared_up, d_shared_down = (torch.zeros_like(w) for w in (shared_gate, shared_up, shared_down))
    for token, gate_up in enumerate(context.shared_gate_up):
        dy = grad_output[token]
        d_shared_down += torch.outer(dy, _activation(gate_up, swiglu_limit))
        dg, du = _activation_backward(gate_up, shared_down.t() @ dy, swiglu_limit)
        d_shared_gate += torch.outer(dg, x[token])
        d_shared_up += torch.outer(du, x[token])
        d_x[token] += shared_gate.t() @ dg + shared_up.t() @ du
    return MoKGradients(d_x, d_router_weights, d_gate, d_up, d_down, d_shared_gate, d_shared_up, d_shared_down)


def with_lora(lora: LoraFactors, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `lora` means: the routed weights `W + B A`."""
    if lora.gate_up_A is not None and lora.gate_up_B is not None:
        d_gate, d_up = (lora.gate_up_B @ lora.gate_up_A).chunk(2, dim=1)
        gate, up = gate + d_gate, up + d_up
    if lora.down_A is not None and lora.down_B is not None:
        down = down + lora.down_B @ lora.down_A
    return gate, up, down


def lora_gradients(lora: LoraFactors, gradients: MoKGradients) -> LoraFactors:
    """From the gradients of the weights `with_lora`: `dA = B^T dW` and `dB = dW A^T`."""
    d_gate, d_up, d_down = gradients.d_routed_gate, gradients.d_routed_up, gradients.d_routed_down
    assert d_gate is not None and d_up is not None and d_down is not None
    grads: list[Tensor | None] = []
    for lora_A, lora_B, d_weight in ((*lora[:2], torch.cat([d_gate, d_up], dim=1)), (*lora[2:], d_down)):
        grads.append(None if lora_B is None else lora_B.mT @ d_weight)
        grads.append(None if lora_A is None else d_weight @ lora_A.mT)
    return LoraFactors(*grads)


def _reader(
    dtype: torch.dtype, routed: Sequence[Weight], *, in_backward: bool
) -> tuple[Callable[[Tensor, int], Tensor], list[Tensor]]:
    """How routed matmuls read activations `[rows, cols]` that they sum over dimension 0 or 1, and the weights that they
    read; all through MXFP8 if the weights are."""
    tensors = [
        mxfp8.expand_weight(weight, dtype, in_backward=in_backward) if isinstance(weight, tuple) else weight
        for weight in routed
    ]
    return mxfp8.round_trip if isinstance(routed[0], tuple) else lambda activations, dim: activations, tensors


def _rows(schedule: MoKSchedule) -> Iterator[tuple[int, int, int, int]]:
    """(row, expert, token, k) of every routed row of the one rank."""
    topk = schedule.route_row.shape[1]
    offsets = schedule.expert_offsets.tolist()
    for expert in range(len(offsets) - 1):
        for row in range(offsets[expert], offsets[expert + 1]):
            token, k = divmod(int(schedule.row_route[row]), topk)
            yield row, expert, token, k


def _activation(gate_up: Tensor, swiglu_limit: float | None) -> Tensor:
    """`silu(g) * u`, with g clamped to at most the limit and u to within +- the limit."""
    gate, up = gate_up.chunk(2)
    if swiglu_limit is not None:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return gate * torch.sigmoid(gate) * up


def _activation_backward(gate_up: Tensor, d_activation: Tensor, swiglu_limit: float | None) -> tuple[Tensor, Tensor]:
    """dg and du; zero beyond the limit."""
    raw_gate, raw_up = gate, up = gate_up.chunk(2)
    if swiglu_limit is not None:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    sigmoid = torch.sigmoid(gate)
    d_gate = d_activation * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = d_activation * gate * sigmoid
    if swiglu_limit is not None:
        d_gate = torch.where(raw_gate <= swiglu_limit, d_gate, 0)
        d_up = torch.where(raw_up.abs() <= swiglu_limit, d_up, 0)
    return d_gate, d_up
