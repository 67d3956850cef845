"""The experts function of transformers, and which of its experts modules mok can stand in for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from mok.nn import moe

# Experts whose own `_apply_gate` clamps (gate at most L, up within L) and is SwiGLU otherwise; the attribute holds L.
_CLAMPED = {"DeepseekV4Experts": "limit", "Glm5NextTextExperts": "swiglu_limit", "HYV4Experts": "swiglu_limit"}


def register() -> None:
    """Make `experts_implementation="mok"` a choice of every transformers model. Calling it again changes nothing.

    It serves every experts module with stacked SwiGLU weights (`gate_up_proj [E, 2I, H]`, `down_proj [E, H, I]`), on
    one rank and under transformers' own expert or tensor parallelism. Others raise `ValueError` when they are called.
    """
    ALL_EXPERTS_FUNCTIONS["mok"] = experts_forward


def swiglu_limit(experts: Any) -> float | None:
    """The clamp L of an experts module, None if it has none.

    Raises `ValueError` with class and reason if mok can not compute what the module computes.
    """
    # PEFT gives a module with an adapter a class of its own, below the original.
    names = [cls.__name__ for cls in type(experts).__mro__]
    limit = next((getattr(experts, attribute) for name, attribute in _CLAMPED.items() if name in names), None)
    activation = getattr(experts, "act_fn", F.silu)
    is_silu = activation is F.silu or isinstance(activation, (nn.SiLU, SiLUActivation))
    reasons = {
        "it has no gate": not getattr(experts, "has_gate", True),
        "it has biases": getattr(experts, "has_bias", False),
        "its weights are transposed": getattr(experts, "is_transposed", False),
        "its gate and up rows are interleaved": not getattr(experts, "is_concatenated", True),
        f"its activation is {activation}, not silu": not is_silu,
        "it has an _apply_gate of its own": limit is None and type(experts)._apply_gate is not _default_apply_gate,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(
            f"{type(experts).__name__}: mok computes down(silu(gate) * up), but {' and '.join(found)};"
            ' choose another experts_implementation, such as "grouped_mm"'
        )
    return limit


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`[T, H]`, ids `[T, K]` and weights `[T, K]` -> `[T, H]`, as transformers' own experts functions.

    An index equal to the number of local experts is transformers' mark for another rank's expert.
    """
    limit = swiglu_limit(experts)
    gate_up_proj, down_proj = experts.gate_up_proj, experts.down_proj
    top_experts = top_k_index.masked_fill(top_k_index >= gate_up_proj.shape[0], -1)
    # Under autocast mok casts for itself; otherwise the weights decide, as in transformers' grouped_mm.
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(gate_up_proj.dtype)
    output = moe(x, top_experts, top_k_weights, gate_up_proj, down_proj, swiglu_limit=limit, module=experts)
    return output.to(hidden_states.dtype)
