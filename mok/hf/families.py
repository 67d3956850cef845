"""The MoE blocks of transformers that `convert` replaces, one row a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# (router_logits [T, E], router_weights [T, K], top_experts [T, K])
Routing = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Family:
    """How a block does what `MoKLayer` does, by the names of its children and attributes ("": it has none).

    router: called with `[T, H]`, and with `bias` if the block keeps one beside it (it may be off: then None).
    shared, shared_gate: the shared expert and the sigmoid gate on it.
    jitter: the width of the noise that multiplies the input in training.
    route: what it does instead of calling its router for `Routing`; gets the block's children and attributes.
    finish: what it does to its output.
    """

    router: str = "gate"
    bias: str = ""
    shared: str = ""
    shared_gate: str = ""
    jitter: str = ""
    route: Callable[[Any, Tensor], Routing] | None = None
    finish: Callable[[Any, Tensor], Tensor] | None = None

    def routing(self, block: Any, x: Tensor) -> Routing:
        if self.route:
            return self.route(block, x)
        router = getattr(block, self.router)
        return router(x, getattr(block, self.bias, None)) if self.bias else router(x)


def _softmax_of_linear(block: Any, x: Tensor) -> Routing:
    """Jamba: the router is a bare linear layer (transformers 5.17), or one like the others (5.24)."""
    router_logits = block.router(x)
    if isinstance(router_logits, tuple):
        return router_logits
    router_weights, top_experts = router_logits.softmax(-1, dtype=torch.float).topk(block.top_k)
    return router_logits, router_weights.to(x.dtype), top_experts


def _ids_first_or_last(block: Any, x: Tensor) -> Routing:
    """The first three Granite routers return their results in reverse (transformers 5.17), or not (5.24)."""
    routing = block.router(x)
    return routing if routing[0].is_floating_point() else routing[::-1]


def _scaled(block: Any, x: Tensor) -> Routing:
    """Laguna scales the sum over the experts, which is to scale the weights."""
    router_logits, router_weights, top_experts = block.gate(x)
    return router_logits, router_weights * block.routed_scaling_factor, top_experts


def _average(block: Any, output: Tensor) -> Tensor:
    """Command-A may take the mean of routed and shared output."""
    averages = block.num_shared_experts > 0 and block.shared_expert_combination_strategy == "average"
    return output / 2 if averages else output


_SHARED = Family(shared="shared_experts")
_SHARED_GATED = Family(shared="shared_expert", shared_gate="shared_expert_gate")
_GRANITE = Family(router="router", route=_ids_first_or_last)

FAMILIES = {
    "AfmoeSparseMoeBlock": Family(
        router="router",
        shared="shared_experts",
        # This router takes [batch, sequence, H] only.
        route=lambda block, x: block.router(x[None], block.expert_bias),
    ),
    "AXK1MoE": Family(shared="shared_experts", finish=lambda block, output: block.post_mlp_layernorm(output)),
    "AXK2MoE": _SHARED,
    "Cohere2MoeSparseMoeBlock": Family(shared="shared_experts", finish=_average),
    "DeepseekOcr2TextMoe": _SHARED,
    "DeepseekV2Moe": _SHARED,
    "DeepseekV32MoE": _SHARED,
    "DeepseekV3MoE": _SHARED,
    "Dots1MoE": _SHARED,
    "Ernie4_5_MoeSparseMoeBlock": _SHARED,
    "ExaoneMoeSparseMoEBlock": _SHARED,
    "FlexOlmoSparseMoeBlock": Family(),
    "Glm4MoeLiteMoE": _SHARED,
    "Glm4MoeMoE": _SHARED,
    "Glm4vMoeTextMoE": _SHARED,
    "Glm5NextTextMoE": _SHARED,
    "GlmMoeDsaMoE": _SHARED,
    "GraniteMoeHybridMoE": _GRANITE,
    "GraniteMoeMoE": _GRANITE,
    "GraniteMoeSWAMoE": Family(router="router"),
    "GraniteMoeSharedMoE": _GRANITE,
    "HYV3MoE": Family(shared="shared_experts", bias="e_score_correction_bias"),
    "HYV4MoE": _SHARED,
    "HunYuanMoEV1Moe": Family(shared="shared_mlp"),
    "JambaSparseMoeBlock": Family(router="router", route=_softmax_of_linear),
    "KimiLinearMoE": _SHARED,
    "LagunaSparseMoeBlock": Family(shared="shared_experts", route=_scaled),
    "Lfm2MoeSparseMoeBlock": Family(bias="expert_bias"),
    "MellumSparseMoeBlock": Family(),
    "MiMoV2FlashMoE": Family(),
    "MiniMaxM2SparseMoeBlock": Family(jitter="jitter_noise", bias="e_score_correction_bias"),
    "MiniMaxSparseMoeBlock": Family(jitter="jitter_noise"),
    "Mistral4MoE": _SHARED,
    "MixtralSparseMoeBlock": Family(jitter="jitter_noise"),
    "OlmoeSparseMoeBlock": Family(),
    "PhimoeSparseMoeBlock": Family(router="router", jitter="input_jitter_noise"),
    "Qwen2MoeSparseMoeBlock": _SHARED_GATED,
    "Qwen3MoeSparseMoeBlock": Family(),
    "Qwen3NextSparseMoeBlock": _SHARED_GATED,
    "Qwen3OmniMoeTalkerTextSparseMoeBlock": _SHARED_GATED,
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": Family(),
    "Qwen3VLMoeTextSparseMoeBlock": Family(),
    "Qwen3_5MoeSparseMoeBlock": _SHARED_GATED,
    "Qwen4ExpTextSparseMoeBlock": _SHARED_GATED,
    "SolarOpenMoE": _SHARED,
}
