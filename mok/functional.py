"""The layer as functions: workspace, schedule, forward, backward. `mok.nn` builds on it; frameworks may call it too.

Symbols: T tokens of this rank, H hidden size, I expert width, I_s width of the shared expert, E_l experts of this rank,
K experts per token, R routed rows on this rank. Rank r owns experts `r*E_l .. (r+1)*E_l - 1`.

    x, output, grad_output  [T, H]       float32, bfloat16, float16 or float64
    router_weights          [T, K]       float32 (float64 when x is)
    routed_gate, routed_up  [E_l, I, H]  dtype of x; any expert stride, last dimension contiguous
    routed_down             [E_l, H, I]
    shared_gate, shared_up  [I_s, H]     None, all three of them, without a shared expert
    shared_down             [H, I_s]

A routed weight may be MXFP8 (`mok.mxfp8`; all three or none): `(data, scales, data_t, scales_t)`, as `quantize_weights`
makes it. Then every routed matmul, in backward too, reads its activations through MXFP8, and x must not be float16.
Forward and recompute read the first pair only, and backward the second of `routed_down` only: there it alone will do.

Routed weights of the torch backend may have low-rank adapters, `lora`: a `LoraFactors` of tensors in the dtype of x,
last dimension contiguous. Then `W x + B (A x)` stands for `W x`, and neither `W + B A` nor its gradient is computed.

Every rank of the group calls each function at the same time; T may differ. Bad arguments raise ValueError (TypeError
for a wrong Python type) that names argument, expected and actual, on every rank of the group if on one.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mok import mxfp8
from mok._backends import pick_backend
from mok._checks import check_contiguous_rows, check_int, check_tensor, describe
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
    Weight,
)
from mok.comm import Communicator, as_communicator
from mok.config import MoKConfig

__all__ = [
    "LoraFactors",
    "MoKConfig",
    "MoKForwardContext",
    "MoKGradients",
    "MoKSchedule",
    "MoKWorkspace",
    "NeedsGrad",
    "backward",
    "build_schedule",
    "check",
    "clear_workspace_cache",
    "create_workspace",
    "forward",
    "get_workspace",
    "recompute_forward_context",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_workspaces: dict[tuple[Any, ...], MoKWorkspace] = {}


def create_workspace(
    config: MoKConfig, group: Any, *, device: torch.device | str, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """A new workspace for calls of up to `num_local_tokens` tokens per rank.

    group: a ProcessGroup, None (one rank), or a member of a `mok.testing.VirtualGroup`.
    Raises ValueError if the backend of `config` can not serve `device`, or if ranks disagree on a size.
    """
    communicator = as_communicator(group)
    facts: dict[str, object] = {}
    with _together(communicator, "create_workspace", facts):
        if not isinstance(config, MoKConfig):
            raise TypeError(f"config: expected MoKConfig, got {type(config).__name__}")
        where = _canonical(device)
        backend = pick_backend(config.backend, where)
        facts |= {
            "hidden_size": check_int("hidden_size", hidden_size, 1),
            "topk": check_int("topk", topk, 1),
            "num_local_tokens": check_int("num_local_tokens", num_local_tokens, 0),
            "config": config,
            "backend": backend.__name__,
        }
    workspace = MoKWorkspace(config, communicator, where, num_local_tokens, hidden_size, topk, backend)
    return replace(workspace, buffers=backend.make_buffers(workspace))


def get_workspace(
    config: MoKConfig, group: Any, *, device: torch.device | str, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """`create_workspace`, or the workspace that an earlier call with equal arguments made."""
    key = (config, group, _canonical(device), num_local_tokens, hidden_size, topk)
    workspace = _workspaces.get(key)
    if workspace is None:
        # A group that is still referenced when Python shuts down keeps its threads, which then can abort the process.
        atexit.unregister(clear_workspace_cache)
        atexit.register(clear_workspace_cache)
        # No lock: making one is collective, and the virtual ranks of one process have different keys.
        workspace = _workspaces[key] = create_workspace(
            config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk
        )
    return workspace


def clear_workspace_cache() -> None:
    """Forget the workspaces of `get_workspace`; those still in use elsewhere live on."""
    _workspaces.clear()


def check(workspace: MoKWorkspace) -> None:
    """Wait for the workspace's device and raise what its kernels have reported: ValueError for bad input that only the
    GPU could see, RuntimeError for a wait that ran out of `timeout_s`."""
    workspace.backend.check(workspace)


def build_schedule(
    workspace: MoKWorkspace, config: MoKConfig, top_experts: Tensor, *, num_local_experts: int
) -> MoKSchedule:
    """Decide which routed row goes where.

    top_experts: int64 or int32 `[T, K]`, T at most the workspace's `num_local_tokens`; -1 drops the route.
    Raises ValueError if an id is out of range, if ranks disagree on a size, or if rows exceed what
    `schedule_capacity_multiplier` allows. On a GPU nothing waits: there the kernels report such an id or such an
    excess, and the next call on the workspace, or `check(workspace)`, raises; the torch backend makes a device assert
    of a bad id.
    """
    facts: dict[str, object] = {
        "hidden_size": workspace.hidden_size,
        "topk": workspace.topk,
        "num_local_tokens": workspace.num_local_tokens,
        "num_local_experts": num_local_experts,
    }
    with _together(workspace.communicator, "build_schedule", facts):
        _check_config(workspace, config)
        check_int("num_local_experts", num_local_experts, 1)
        shape = ("T", workspace.topk)
        check_tensor("top_experts", top_experts, shape, (torch.int64, torch.int32), workspace.device)
        if top_experts.shape[0] > workspace.num_local_tokens:
            raise ValueError(
                f"top_experts: expected at most num_local_tokens = {workspace.num_local_tokens} tokens, "
                f"got {top_experts.shape[0]}"
            )
        if not workspace.backend.REPORTS_BAD_EXPERT_IDS:
            _check_expert_ids(top_experts, num_local_experts * workspace.communicator.size)
    with _plain(workspace.device):
        return workspace.backend.build_schedule(workspace, top_experts, num_local_experts)


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
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
    *,
    save_for_backward: bool = True,
    lora: LoraFactors | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    """`y[t] = shared(x[t]) + sum over k of w[t, k] * W_down (silu(W_gate x[t]) * (W_up x[t]))` with the weights of
    expert `top_experts[t, k]`; returns `(y, context)`.

    swiglu_limit: g is clamped to at most this, u to within +- this, before the activation.
    save_for_backward: without it the context is empty and only good for `backward` after `recompute_forward_context`.
    lora: adapters of the routed weights; the torch backend's only, and not with MXFP8.
    """
    weights = ExpertWeights(shared_gate, shared_up, shared_down, routed_gate, routed_up, routed_down)
    facts: dict[str, object] = {}
    with _together(workspace.communicator, "forward", facts):
        _check_call(config, workspace, schedule, x, weights, swiglu_limit, facts, lora)
        _check_router_weights(schedule, x, router_weights)
    with _plain(workspace.device):
        return workspace.backend.forward(
            workspace,
            schedule,
            x.contiguous(),
            router_weights,
            weights,
            swiglu_limit,
            save_for_backward,
            **_given(lora=lora),
        )


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    routed_gate: Weight,
    routed_up: Weight,
    swiglu_limit: float | None = None,
    *,
    lora: LoraFactors | None = None,
) -> MoKForwardContext:
    """The context of `forward`, bit for bit, without down projection and combine."""
    weights = ExpertWeights(shared_gate, shared_up, None, routed_gate, routed_up, None)
    facts: dict[str, object] = {}
    with _together(workspace.communicator, "recompute_forward_context", facts):
        _check_call(config, workspace, schedule, x, weights, swiglu_limit, facts, lora, needs_down=False)
    with _plain(workspace.device):
        return workspace.backend.recompute_forward_context(
            workspace, schedule, x.contiguous(), weights, swiglu_limit, **_given(lora=lora)
        )


def backward(
    config: MoKConfig,
    workspace: MoKWorkspace,
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
    main_grads: Sequence[Tensor | None] | None = None,
    *,
    needs_grad: Sequence[bool] | None = None,
    lora: LoraFactors | None = None,
    lora_grads: LoraFactors | None = None,
) -> MoKGradients:
    """The gradients of `forward`, in the order of `MoKGradients`.

    At the edge of `swiglu_limit` the gradient passes, as in torch.clamp; beyond it is zero. Dropped routes and experts
    without rows get exact zeros. The shared expert's weight gradients are of this rank's tokens only (data parallel).
    main_grads: for each weight, in the order of the arguments, a float32 or bfloat16 buffer that its gradient is added
        to (then None is returned for it), or None.
    needs_grad: eight flags in the order of the results (`NeedsGrad`); the others are not computed and returned as None.
        Default: all.
    lora: as in forward. lora_grads: for each of its factors a buffer like it, that its gradient is added to, or None.
    """
    weights = ExpertWeights(shared_gate, shared_up, shared_down, routed_gate, routed_up, routed_down)
    facts: dict[str, object] = {}
    with _together(workspace.communicator, "backward", facts):
        _check_call(config, workspace, schedule, x, weights, swiglu_limit, facts, lora, in_backward=True)
        _check_router_weights(schedule, x, router_weights)
        check_tensor("grad_output", grad_output, x.shape, x.dtype, x.device)
        if context.gate_up.numel() == 0 and schedule.row_route.numel() > 0:
            raise ValueError("context: expected a saved one, got an empty one (from save_for_backward=False)")
        needs = _check_needs_grad(needs_grad)
        targets = _check_main_grads(main_grads, weights, x.dtype)
        for name in ("x", "router_weights", "routed_gate", "routed_up", "routed_down"):
            facts[f"needs_grad.{name}"] = getattr(needs, name)
        facts |= _check_lora_grads(lora, lora_grads)
    with _plain(workspace.device):
        return workspace.backend.backward(
            workspace,
            schedule,
            context,
            grad_output.contiguous(),
            x.contiguous(),
            router_weights,
            weights,
            swiglu_limit,
            targets,
            needs,
            **_given(lora=lora, lora_grads=lora_grads),
        )


@contextmanager
def _together(communicator: Communicator, call: str, facts: dict[str, object]) -> Iterator[None]:
    """Around the checks of a call: all ranks go on, or all raise what one of them found."""
    error = None
    try:
        yield
    except (TypeError, ValueError) as caught:
        error = caught
    communicator.agree(call, facts, error)


class _plain:
    """A backend computes in the dtypes it is given and writes its own gradients: no autograd, no autocast. (By hand,
    because torch's two context managers together take 20 us, which a decode step feels.)"""

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type

    def __enter__(self) -> None:
        self.had_grad, self.had_autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(self.device_type)
        torch.set_grad_enabled(False)
        if self.had_autocast:
            torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_grad_enabled(self.had_grad)
        if self.had_autocast:
            torch.set_autocast_enabled(self.device_type, True)


def _canonical(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_config(workspace: MoKWorkspace, config: MoKConfig) -> None:
    if config.backend != workspace.config.backend:
        raise ValueError(f"config: expected the workspace's backend {workspace.config.backend}, got {config.backend}")


def _check_expert_ids(top_experts: Tensor, num_experts: int) -> None:
    if top_experts.numel() == 0:
        return
    lowest, highest = top_experts.aminmax()
    message = f"top_experts: expected ids from -1 (dropped) to {num_experts - 1}"
    if top_experts.is_cuda:
        torch._assert_async((lowest >= -1) & (highest < num_experts), message)
    elif lowest < -1 or highest >= num_experts:
        raise ValueError(f"{message}, got {int(lowest)} to {int(highest)}")


def _check_call(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    facts: dict[str, object],
    lora: LoraFactors | None = None,
    needs_down: bool = True,
    in_backward: bool = False,
) -> None:
    """What forward, recompute and backward have in common. Adds to `facts` what ranks must agree on."""
    _check_config(workspace, config)
    hidden_size = workspace.hidden_size
    check_tensor("x", x, (schedule.route_row.shape[0], hidden_size), _FLOATS, workspace.device)
    facts["dtype of x"] = x.dtype
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit: expected a positive number or None, got {swiglu_limit}")
    num_local_experts = schedule.expert_offsets.shape[0] - 1
    facts["MXFP8"] = _check_precision(x, weights, needs_down, in_backward)
    shape: tuple[int | str, ...] = (num_local_experts, "I", hidden_size)
    width = _check_routed_weight("routed_gate", weights.routed_gate, shape, x, in_backward)[1]
    shape = (num_local_experts, width, hidden_size)
    _check_routed_weight("routed_up", weights.routed_up, shape, x, in_backward)
    if needs_down:
        shape = (num_local_experts, hidden_size, width)
        _check_routed_weight("routed_down", weights.routed_down, shape, x, in_backward)
    facts["lora"] = "none" if lora is None else _check_lora(workspace, x, weights, lora, num_local_experts, width)
    shared = [weights.shared_gate, weights.shared_up, *([weights.shared_down] if needs_down else [])]
    if all(weight is None for weight in shared):
        return
    shared_width = _check_weight("shared_gate", weights.shared_gate, ("I_s", hidden_size), x)[0]
    _check_weight("shared_up", weights.shared_up, (shared_width, hidden_size), x)
    if needs_down:
        _check_weight("shared_down", weights.shared_down, (hidden_size, shared_width), x)


def _check_precision(x: Tensor, weights: ExpertWeights, needs_down: bool, in_backward: bool) -> bool:
    """Whether the routed weights are MXFP8: all or none, with both forms of gate and up in backward."""
    routed = weights._asdict()
    is_mxfp8 = isinstance(weights.routed_gate, tuple)
    for name in ("routed_gate", "routed_up", "routed_down")[: 3 if needs_down else 2]:
        if isinstance(routed[name], tuple) != is_mxfp8:
            kind = "an MXFP8 tuple" if is_mxfp8 else "a tensor"
            raise ValueError(f"{name}: expected {kind}, as routed_gate is, got {describe(routed[name])}")
        if is_mxfp8 and in_backward and name != "routed_down" and len(routed[name]) == 2:
            raise ValueError(f"{name}: expected (data, scales, data_t, scales_t) in backward, got a tuple of 2")
    if is_mxfp8 and x.dtype == torch.float16:
        raise ValueError("x: expected torch.bfloat16, float32 or float64 with MXFP8 weights, got torch.float16")
    return is_mxfp8


def _check_routed_weight(
    name: str, weight: object, shape: Sequence[int | str], x: Tensor, in_backward: bool
) -> Sequence[int]:
    if isinstance(weight, tuple):
        return mxfp8.check_weight(name, weight, shape, x.device, in_backward=in_backward)
    return _check_weight(name, weight, shape, x)


def _check_lora(
    workspace: MoKWorkspace, x: Tensor, weights: ExpertWeights, lora: LoraFactors, num_local_experts: int, width: int
) -> str:
    """Their ranks, in words: what all ranks of the group must agree on."""
    if not getattr(workspace.backend, "SUPPORTS_LORA", False):
        name = workspace.backend.__name__.removeprefix("mok.").removesuffix("_backend")
        raise ValueError(f'lora: expected None with backend "{name}" (only "torch" computes adapters), got adapters')
    if isinstance(weights.routed_gate, tuple):
        raise ValueError("lora: expected None with MXFP8 weights, got adapters")
    if not isinstance(lora, LoraFactors):
        raise TypeError(f"lora: expected LoraFactors or None, got {type(lora).__name__}")
    ranks = []
    for target, rows, columns in (("gate_up", 2 * width, x.shape[1]), ("down", x.shape[1], width)):
        first, second = getattr(lora, f"{target}_A"), getattr(lora, f"{target}_B")
        if first is None and second is None:
            continue
        r = _check_weight(f"lora.{target}_A", first, (num_local_experts, "r", columns), x)[1]
        _check_weight(f"lora.{target}_B", second, (num_local_experts, rows, r), x)
        ranks.append(f"{target} r={r}")
    return ", ".join(ranks)


def _check_lora_grads(lora: LoraFactors | None, lora_grads: LoraFactors | None) -> dict[str, object]:
    """Which are wanted: what all ranks of the group must agree on."""
    lora, lora_grads = lora or NO_LORA, lora_grads or NO_LORA
    for name, factor, grad in zip(LoraFactors._fields, lora, lora_grads, strict=True):
        if grad is not None and factor is None:
            raise ValueError(f"lora_grads.{name}: expected None where lora has None, got {describe(grad)}")
        if grad is not None and factor is not None:
            check_tensor(f"lora_grads.{name}", grad, factor.shape, factor.dtype, factor.device)
    return {f"lora_grads.{name}": grad is not None for name, grad in lora_grads._asdict().items()}


def _given(**options: LoraFactors | None) -> dict[str, LoraFactors]:
    """The options that are not None: not every backend takes them."""
    return {name: option for name, option in options.items() if option is not None}


def _check_weight(name: str, weight: object, shape: Sequence[int | str], x: Tensor) -> torch.Size:
    checked = check_tensor(name, weight, shape, x.dtype, x.device)
    check_contiguous_rows(name, checked)
    return checked.shape


def _check_router_weights(schedule: MoKSchedule, x: Tensor, router_weights: Tensor) -> None:
    dtype = torch.promote_types(x.dtype, torch.float32)
    check_tensor("router_weights", router_weights, schedule.route_row.shape, dtype, x.device)


def _check_needs_grad(needs_grad: Sequence[bool] | None) -> NeedsGrad:
    if needs_grad is None:
        return NeedsGrad()
    if len(needs_grad) != len(NeedsGrad._fields):
        raise ValueError(f"needs_grad: expected {len(NeedsGrad._fields)} flags, got {len(needs_grad)}")
    return NeedsGrad(*map(bool, needs_grad))


def _check_main_grads(
    main_grads: Sequence[Tensor | None] | None, weights: ExpertWeights, dtype: torch.dtype
) -> MainGrads:
    if main_grads is None:
        return MainGrads()
    if len(main_grads) != len(weights):
        raise ValueError(f"main_grads: expected {len(weights)} buffers or None each, got {len(main_grads)}")
    for name, weight, main_grad in zip(ExpertWeights._fields, weights, main_grads, strict=True):
        if main_grad is not None:
            if weight is None:
                raise ValueError(f"main_grads: expected None for {name}, which is None, got a buffer")
            dtypes = (torch.float32, torch.bfloat16, dtype)
            data = weight[-2].mT if isinstance(weight, tuple) else weight
            check_tensor(f"main_grads[{name}]", main_grad, data.shape, dtypes, data.device)
    return MainGrads(*main_grads)
