"""Tiny random models of every family that `docs` calls canonical, and how they are run and compared."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerModel,
    Qwen3OmniMoeThinkerTextModel,
)

from mok.testing import assert_close_rel_l2

VOCAB_SIZE = 96
NUM_EXPERTS = 8

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {**_COMMON, "head_dim": 8}
# Multi-head latent attention.
_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
}
_WIDE = {"intermediate_size": 48, "moe_intermediate_size": 16}
_ROUTED = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
_LOCAL = {"intermediate_size": 16, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_WIDE,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_INDEXER = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
_GATED_SHARED = {**_WIDE, **_ROUTED, "shared_expert_intermediate_size": 24}
_LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED_ROUTED = {**_WIDE, **_ROUTED, "num_shared_experts": 2}

_MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {**_HEADS, **_SHARED_ROUTED, "num_dense_layers": 1, "route_scale": 1.5, "sliding_window": 8},
    "axk1": {**_LATENT, **_DEEPSEEK},
    "axk2": {**_LATENT, **_DEEPSEEK},
    "cohere2_moe": {
        **_HEADS,
        **_ROUTED,
        "intermediate_size": 16,
        "num_shared_experts": 2,
        "shared_expert_combination_strategy": "average",
        "sliding_window": 8,
    },
    "deepseek_ocr2_text": {**_LATENT, **_DEEPSEEK, "head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {**_LATENT, **_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, **_DEEPSEEK},
    "deepseek_v32": {**_LATENT, **_DEEPSEEK, **_INDEXER},
    "dots1": {**_HEADS, **_DEEPSEEK},
    "ernie4_5_moe": {**_HEADS, **_WIDE, "moe_num_experts": NUM_EXPERTS, "moe_k": 2, "moe_num_shared_experts": 2},
    "exaone_moe": {**_HEADS, **_DEEPSEEK, **_SHARED_ROUTED, "sliding_window": 8},
    "flex_olmo": {**_COMMON, **_ROUTED, "intermediate_size": 16},
    "glm4_moe": {**_HEADS, **_DEEPSEEK},
    "glm4_moe_lite": {**_LATENT, **_DEEPSEEK},
    "glm4v_moe_text": {
        **_HEADS,
        **_DEEPSEEK,
        "rope_parameters": {**_MULTIMODAL_ROPE, "partial_rotary_factor": 1.0},
    },
    "glm5_next_text": {
        **_LATENT,
        **_DEEPSEEK,
        **_INDEXER,
        "index_topk": 16,
        "qk_rope_head_dim": 0,
        "qk_head_dim": 8,
        "swiglu_limit": 0.05,
        "layer_types": ["full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": {**_LATENT, **_DEEPSEEK, **_INDEXER},
    "granitemoe": {**_COMMON, **_LOCAL},
    "granitemoe_swa": {**_COMMON, **_LOCAL, "shared_intermediate_size": 24},
    "granitemoehybrid": {
        **_COMMON,
        **_LOCAL,
        "shared_intermediate_size": 24,
        "layer_types": ["attention", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "granitemoeshared": {**_COMMON, **_LOCAL, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {**_HEADS, "intermediate_size": 16, "num_experts": NUM_EXPERTS, "moe_topk": 2},
    "hy_v3": {**_HEADS, **_SHARED_ROUTED, "router_scaling_factor": 1.5, "first_k_dense_replace": 1},
    "hy_v4": {**_HEADS, **_DEEPSEEK, "swiglu_limit": 0.05},
    "jamba": {
        **_COMMON,
        **_ROUTED,
        "intermediate_size": 16,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        **_LATENT,
        **_DEEPSEEK,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "layer_types": ["full_attention"] * 2,  # linear attention takes seconds
    },
    "laguna": {**_HEADS, **_GATED_SHARED, "moe_routed_scaling_factor": 1.5},
    "lfm2_moe": {**_COMMON, **_WIDE, **_ROUTED, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mellum": {**_HEADS, **_WIDE, **_ROUTED},
    "mimo_v2_flash": {**_HEADS, **_DEEPSEEK, "v_head_dim": 8},
    "minimax": {**_HEADS, **_LOCAL, "block_size": 8},
    "minimax_m2": {**_HEADS, **_LOCAL, "rotary_dim": 8},
    "mistral4": {**_LATENT, **_DEEPSEEK},
    "mixtral": {**_HEADS, **_LOCAL},
    "olmoe": {**_COMMON, **_ROUTED, "intermediate_size": 16},
    "phimoe": {**_COMMON, **_LOCAL},
    "qwen2_moe": {**_COMMON, **_GATED_SHARED},
    "qwen3_5_moe_text": {**_HEADS, **_GATED_SHARED, **_LINEAR_ATTENTION},
    "qwen3_moe": {**_HEADS, **_WIDE, **_ROUTED, "norm_topk_prob": True},
    "qwen3_next": {**_HEADS, **_GATED_SHARED, **_LINEAR_ATTENTION},
    "qwen3_omni_moe_talker_text": {**_HEADS, **_GATED_SHARED, "rope_parameters": _MULTIMODAL_ROPE},
    "qwen3_omni_moe_text": {**_HEADS, **_WIDE, **_ROUTED, "rope_parameters": _MULTIMODAL_ROPE},
    "qwen3_vl_moe_text": {**_HEADS, **_WIDE, **_ROUTED},
    "qwen4_exp_text": {
        **_HEADS,
        **_GATED_SHARED,
        **_LINEAR_ATTENTION,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "solar_open": {**_HEADS, **_DEEPSEEK},
}

# In fp32 transformers' own gradients of the hyper-connections are off by 5e-3, which no comparison survives.
_DTYPES = {"glm5_next_text": torch.float64, "hy_v4": torch.float64}


# Parts of larger models, which no auto class makes.
_PARTS = {
    "deepseek_ocr2_text": DeepseekOcr2TextModel,
    "qwen3_omni_moe_talker_text": Qwen3OmniMoeTalkerModel,
    "qwen3_omni_moe_text": Qwen3OmniMoeThinkerTextModel,
}


def build(family: str, experts_implementation: str = "eager", **changes: Any) -> PreTrainedModel:
    """A random model, the same for the same arguments."""
    config = AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
    auto = AutoModelForCausalLM if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModel
    torch.manual_seed(0)
    make = _PARTS[family]._from_config if family in _PARTS else auto.from_config
    model = make(config, experts_implementation=experts_implementation)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Zeros would not show whether they are used.
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.uniform_(0.0, 0.5)
            # transformers leaves those of the Qwen3-Omni talker as the allocator gave them.
            if name.endswith(("gate.weight", "router.weight")) or ".experts." in name:
                tensor.normal_(std=config.initializer_range)
    return model.to(_DTYPES.get(family, torch.float32)).eval()


def batch() -> dict[str, torch.Tensor]:
    """Two sequences, the first padded on the left."""
    input_ids = torch.randint(3, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :3] = 0
    input_ids[0, :3] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@dataclass
class Run:
    """What one forward and backward gave."""

    output: torch.Tensor
    loss: torch.Tensor
    aux_loss: torch.Tensor | None
    router_logits: tuple[torch.Tensor, ...] | None
    grads: dict[str, torch.Tensor | None]


# The aux loss of these crashes in transformers 5.17 (Granite records no logits).
_NO_ROUTER_LOGITS = ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared")


def run(model: PreTrainedModel) -> Run:
    """Logits, loss (with the auxiliary loss where the family has one) and the gradient of every parameter."""
    inputs = batch()
    is_causal_lm = "CausalLM" in type(model).__name__
    if is_causal_lm:
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    if isinstance(model, Qwen3OmniMoeTalkerModel):
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    model.zero_grad()
    wants_router_logits = model.config.model_type not in _NO_ROUTER_LOGITS
    result = model(**inputs, output_router_logits=wants_router_logits, use_cache=False)
    output = result.logits if is_causal_lm else result.last_hidden_state
    # A norm comes last where there is no head: a loss that is no function of the length alone.
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    loss = result.loss if is_causal_lm else (output * noise).mean()
    loss.backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Run(output.detach(), loss.detach(), result.get("aux_loss"), result.get("router_logits"), grads)


def assert_same(actual: Run, expected: Run) -> None:
    """Logits and loss within 1e-5, the gradient of every parameter within 1e-5 relative L2."""
    torch.testing.assert_close(actual.output, expected.output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert (actual.aux_loss is None) == (expected.aux_loss is None)
    if expected.aux_loss is not None:
        torch.testing.assert_close(actual.aux_loss, expected.aux_loss, atol=1e-5, rtol=1e-5)
    assert len(actual.router_logits or ()) == len(expected.router_logits or ())
    for mine, theirs in zip(actual.router_logits or (), expected.router_logits or (), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert actual.grads.keys() == expected.grads.keys()
    for name, theirs in expected.grads.items():
        assert_close_rel_l2(f"gradient of {name}", actual.grads[name], theirs, 1e-5)


def clone(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model)
