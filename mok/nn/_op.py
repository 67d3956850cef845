"""The seam to autograd and torch.compile: `mok.functional` as the custom ops `mok::moe` and `mok::moe_backward`.

A compiler sees two opaque ops. What the first saves for the second depends on the backend, and its size on the routing;
so all of it travels as one-dimensional bytes (`mok.nn._saved`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from mok import functional
from mok._backends import pick_backend
from mok._checks import check_tensor
from mok._types import NO_LORA
from mok.comm import Communicator, as_communicator
from mok.config import MoKConfig
from mok.functional import LoraFactors, MoKForwardContext, MoKSchedule, MoKWorkspace
from mok.nn._saved import distinct, pack, unpack
from mok.nn.replay import replay


@dataclass(frozen=True, eq=False)
class Seat:
    """A process group and a config, known to the ops by number, because the schema of an op has no objects.

    A copied module shares it. It can be pickled without a process group only, which no other process would know.
    """

    process_group: Any
    config: MoKConfig
    number: int

    def __deepcopy__(self, memo: object) -> Seat:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.process_group is not None:
            raise TypeError("process_group: expected None to pickle, got one; save the state_dict instead")
        return seat_of, (None, self.config)


_seats: list[Seat] = []
_numbers: dict[tuple[Any, MoKConfig], int] = {}
# The most tokens per rank so far, by seat, device, H and K: the sizes of the workspaces in use.
_capacities: dict[tuple[int, torch.device, int, int], int] = {}


def seat_of(process_group: Any, config: MoKConfig | None) -> Seat:
    key = (process_group, config or MoKConfig())
    if key not in _numbers:
        _numbers[key] = len(_seats)
        _seats.append(Seat(*key, number=len(_seats)))
    return _seats[_numbers[key]]


_DEFAULT_SEAT = seat_of(None, None)


def moe(
    x: Tensor,
    top_experts: Tensor,
    router_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    swiglu_limit: float | None = None,
    lora: LoraFactors | None = None,
    module: nn.Module | None = None,
    seat: Seat | None = None,
) -> Tensor:
    """Differentiable `mok.functional.forward`: `[T, H]` -> `[T, H]`.

    x [T, H]; top_experts int64 or int32 [T, K], -1 = dropped; router_weights [T, K], any floating dtype;
    gate_up_proj [E_l, 2I, H], gate rows first; down_proj [E_l, H, I]; shared: gate and up [I_s, H], down [H, I_s].
    Under autocast x and all expert weights are cast to its dtype, which is then that of the result.
    lora: adapters of gate_up_proj and down_proj, of any floating dtype; only with a config that says backend="torch".
    module: whose forward this is; where activation checkpointing repeats it, ids and weights are those of the first
    time (`mok.nn.replay`). seat: process group and config (`seat_of`); default: one rank.

    Raises as `mok.functional`, on all ranks if on one.
    """
    weights = (gate_up_proj, down_proj, *(shared or (None, None, None)))
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weights = tuple(weight if weight is None else weight.to(dtype) for weight in weights)
    router_weights = router_weights.to(torch.promote_types(x.dtype, torch.float32))
    factors = [None if factor is None else factor.to(x.dtype) for factor in lora or NO_LORA]
    seat_number = (seat or _DEFAULT_SEAT).number

    def compute(top_experts: Tensor, router_weights: Tensor) -> Tensor:
        tensors = (x, top_experts, router_weights, *weights)
        save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, *factors))
        return torch.ops.mok.moe(*tensors, swiglu_limit, seat_number, save, *factors)[0]

    if module is None:
        return compute(top_experts, router_weights)
    return replay(module, compute, top_experts, router_weights)


@torch.library.custom_op("mok::moe", mutates_args=())
def _moe(
    x: Tensor,
    top_experts: Tensor,
    router_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    swiglu_limit: float | None,
    seat: int,
    save: bool,
    lora_gate_up_A: Tensor | None,
    lora_gate_up_B: Tensor | None,
    lora_down_A: Tensor | None,
    lora_down_B: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    workspace = _workspace(seat, x, top_experts, gate_up_proj)
    config = workspace.config
    gate, up = gate_up_proj.chunk(2, dim=1)
    schedule = functional.build_schedule(workspace, config, top_experts, num_local_experts=gate_up_proj.shape[0])
    output, context = functional.forward(
        config,
        workspace,
        schedule,
        x,
        router_weights,
        shared_gate,
        shared_up,
        shared_down,
        gate,
        up,
        down_proj,
        swiglu_limit,
        save_for_backward=save,
        lora=_lora(lora_gate_up_A, lora_gate_up_B, lora_down_A, lora_down_B),
    )
    if not save:
        return output, torch.empty(0, dtype=torch.int64, device="cpu"), []
    return output, *pack(schedule, context, workspace.num_local_tokens, x.device, given=top_experts)


@_moe.register_fake
def _(
    x: Tensor,
    top_experts: Tensor,
    router_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    swiglu_limit: float | None,
    seat: int,
    save: bool,
    lora_gate_up_A: Tensor | None,
    lora_gate_up_B: Tensor | None,
    lora_down_A: Tensor | None,
    lora_down_B: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not save:
        return output, torch.empty(0, dtype=torch.int64, device="cpu"), []
    new_size = torch.library.get_ctx().new_dynamic_size
    num_saved = sum(len(fields(kind)) for kind in _saved_types(_seats[seat].config, x.device))
    saved = [torch.empty(new_size(), dtype=torch.uint8, device=x.device) for _ in range(num_saved)]
    return output, torch.empty(new_size(), dtype=torch.int64, device="cpu"), saved


@torch.library.custom_op("mok::moe_backward", mutates_args=())
def _moe_backward(
    grad_output: Tensor,
    header: Tensor,
    saved: list[Tensor],
    x: Tensor,
    router_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    swiglu_limit: float | None,
    seat: int,
    needs_grad: list[bool],
    lora_gate_up_A: Tensor | None,
    lora_gate_up_B: Tensor | None,
    lora_down_A: Tensor | None,
    lora_down_B: Tensor | None,
) -> list[Tensor]:
    """The gradients that `needs_grad` asks for, of x, router_weights, the five weights and the four factors of their
    adapters, in this order."""
    config, group = _seats[seat].config, _seats[seat].process_group
    schedule, context, num_local_tokens = unpack(header, saved, *_saved_types(config, x.device))
    workspace = functional.get_workspace(
        config,
        group,
        device=x.device,
        num_local_tokens=num_local_tokens,
        hidden_size=x.shape[1],
        topk=router_weights.shape[1],
    )
    needs_x, needs_router, needs_gate_up, *needs_others = needs_grad[:7]
    lora = _lora(lora_gate_up_A, lora_gate_up_B, lora_down_A, lora_down_B)
    lora_grads = [
        torch.zeros_like(factor, memory_format=torch.contiguous_format) if needed and factor is not None else None
        for factor, needed in zip(lora or NO_LORA, needs_grad[7:], strict=True)
    ]
    gate, up = gate_up_proj.chunk(2, dim=1)
    d_x, d_router, d_gate, d_up, *d_others = functional.backward(
        config,
        workspace,
        schedule,
        context,
        grad_output,
        x,
        router_weights,
        shared_gate,
        shared_up,
        shared_down,
        gate,
        up,
        down_proj,
        swiglu_limit,
        needs_grad=[needs_x, needs_router, needs_gate_up, needs_gate_up, *needs_others],
        lora=lora,
        lora_grads=lora and LoraFactors(*lora_grads),
    )
    d_gate_up = None if d_gate is None or d_up is None else _joined(d_gate, d_up)
    grads = (d_x, d_router, d_gate_up, *d_others, *lora_grads)
    return distinct([grad for grad, needed in zip(grads, needs_grad, strict=True) if needed and grad is not None])


@_moe_backward.register_fake
def _(
    grad_output: Tensor,
    header: Tensor,
    saved: list[Tensor],
    x: Tensor,
    router_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    swiglu_limit: float | None,
    seat: int,
    needs_grad: list[bool],
    lora_gate_up_A: Tensor | None,
    lora_gate_up_B: Tensor | None,
    lora_down_A: Tensor | None,
    lora_down_B: Tensor | None,
) -> list[Tensor]:
    weights = (gate_up_proj, down_proj, shared_gate, shared_up, shared_down)
    inputs = (x, router_weights, *weights, lora_gate_up_A, lora_gate_up_B, lora_down_A, lora_down_B)
    wanted = [tensor for tensor, needed in zip(inputs, needs_grad, strict=True) if needed]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in wanted if tensor is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    x, _, *others = inputs[:8]
    swiglu_limit, seat, _, *lora = inputs[8:]
    _, header, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(header, *saved)
    ctx.save_for_backward(header, x, *others, *lora, *saved)
    ctx.swiglu_limit, ctx.seat = swiglu_limit, seat


def _backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 15
    needs_x, _, *needs_others = ctx.needs_input_grad[:8]
    needs = [needs_x, *needs_others, *ctx.needs_input_grad[11:]]
    header, *rest = ctx.saved_tensors
    inputs, lora, saved = rest[:7], rest[7:11], rest[11:]
    others = (ctx.swiglu_limit, ctx.seat, needs, *lora)
    grads = iter(torch.ops.mok.moe_backward(grad_output, header, saved, *inputs, *others))
    d_x, *d_others = [next(grads) if needed else None for needed in needs]
    return d_x, None, *d_others[:6], None, None, None, *d_others[6:]


_moe.register_autograd(_backward, setup_context=_setup_context)


def _lora(*factors: Tensor | None) -> LoraFactors | None:
    return None if all(factor is None for factor in factors) else LoraFactors(*factors)


def _workspace(seat: int, x: Tensor, top_experts: Tensor, gate_up_proj: Tensor) -> MoKWorkspace:
    """The workspace that all layers of this shape share; large enough for every rank's tokens. Collective.

    It lies in the cache of `mok.functional`, by process group, and not in a buffer of the modules, which `.to()` would
    move, deepcopy copy, DDP broadcast and FSDP2 meet on a device where it does not belong.
    """
    config, group = _seats[seat].config, _seats[seat].process_group
    communicator = as_communicator(group)
    facts, error = {}, None
    try:
        check_tensor("hidden_states", x, ("T", "H"), x.dtype)
        check_tensor("top_experts", top_experts, (x.shape[0], "K"), (torch.int64, torch.int32), x.device)
        check_tensor("gate_up_proj", gate_up_proj, ("E_l", "2I", x.shape[1]), x.dtype, x.device)
        facts = {"hidden_size": x.shape[1], "top_k": top_experts.shape[1], "num_local_experts": gate_up_proj.shape[0]}
    except ValueError as caught:
        error = caught
    communicator.agree("moe", facts, error)
    hidden_size, topk = x.shape[1], top_experts.shape[1]
    num_tokens = _most_tokens(communicator, x)
    key = (seat, x.device, hidden_size, topk)
    capacity = _capacities.get(key)
    if capacity is None or num_tokens > capacity:
        # Twice as much as before, so that slowly growing batches do not make a workspace each.
        capacity = _capacities[key] = max(num_tokens, 2 * (capacity or 0))
    return functional.get_workspace(
        config, group, device=x.device, num_local_tokens=capacity, hidden_size=hidden_size, topk=topk
    )


def _most_tokens(communicator: Communicator, x: Tensor) -> int:
    if communicator.size == 1:
        return x.shape[0]
    return int(communicator.all_gather(torch.tensor([x.shape[0]], device=x.device)).max())


@cache
def _saved_types(config: MoKConfig, device: torch.device) -> tuple[type[MoKSchedule], type[MoKForwardContext]]:
    """The backend's classes: what its functions say that they return."""
    backend = pick_backend(config.backend, device)
    makers = (backend.build_schedule, backend.recompute_forward_context)
    schedule_type, context_type = (get_type_hints(maker)["return"] for maker in makers)
    return schedule_type, context_type


def _joined(d_gate: Tensor, d_up: Tensor) -> Tensor:
    """`[E_l, 2I, H]`; no copy where the backend wrote both into one such tensor."""
    base = d_gate._base
    if base is not None and base is d_up._base and base.shape[1] == d_gate.shape[1] + d_up.shape[1]:
        return base
    return torch.cat([d_gate, d_up], dim=1)
