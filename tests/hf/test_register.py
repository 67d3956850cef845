"""The experts function on single modules: what transformers may pass to it, and what it refuses."""

import copy

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import mok.hf

NUM_EXPERTS, HIDDEN_SIZE = tiny.NUM_EXPERTS, 32


@pytest.fixture(autouse=True)
def _registered() -> None:
    mok.hf.register()


def make_experts(dtype: torch.dtype = torch.float32, **changes) -> Qwen3MoeExperts:
    config = AutoConfig.for_model("qwen3_moe", **{**tiny.CONFIGS["qwen3_moe"], **changes}, experts_implementation="mok")
    experts = Qwen3MoeExperts(config)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    return experts.to(dtype)


def make_inputs(num_tokens: int = 10, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    hidden_states = torch.randn(num_tokens, HIDDEN_SIZE, dtype=dtype)
    router_weights, top_experts = torch.rand(num_tokens, NUM_EXPERTS).softmax(-1).topk(2)
    return hidden_states, top_experts, router_weights


def eager(experts: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    experts = copy.deepcopy(experts)
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = "eager"
    return experts(*inputs)


def test_registering_twice_is_registering_once() -> None:
    before = ALL_EXPERTS_FUNCTIONS["mok"]
    mok.hf.register()
    assert ALL_EXPERTS_FUNCTIONS["mok"] is before


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_bf16_with_weights_in_either_dtype(weights_dtype: torch.dtype) -> None:
    experts = make_experts(torch.bfloat16)
    hidden_states, top_experts, router_weights = make_inputs(dtype=torch.bfloat16)
    router_weights = router_weights.to(weights_dtype)
    exact = eager(experts.float(), hidden_states.float(), top_experts, router_weights.float())
    output = experts.bfloat16()(hidden_states, top_experts, router_weights)
    assert output.dtype == torch.bfloat16
    assert (output.float() - exact).norm() / exact.norm() < 1e-2


def test_fp32_input_with_bf16_weights_gives_fp32() -> None:
    experts = make_experts(torch.bfloat16)
    hidden_states, top_experts, router_weights = make_inputs()
    output = experts(hidden_states, top_experts, router_weights)
    exact = eager(experts.float(), hidden_states, top_experts, router_weights)
    assert output.dtype == torch.float32
    assert (output - exact).norm() / exact.norm() < 1e-2


def test_autocast_computes_in_bf16() -> None:
    experts = make_experts()
    inputs = make_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        output = experts(*inputs)
    exact = eager(experts, *inputs)
    assert 1e-5 < (output.float() - exact).norm() / exact.norm() < 1e-2


def test_not_mine_marks_are_skipped() -> None:
    """Under transformers' EP an index equal to the number of local experts means another rank's expert."""
    experts = make_experts()
    hidden_states, top_experts, router_weights = make_inputs()
    top_experts[::2, 1] = NUM_EXPERTS
    # Not zeroed, unlike transformers does: the mark alone must suffice.
    output = experts(hidden_states, top_experts, router_weights)
    mine = router_weights.masked_fill(top_experts == NUM_EXPERTS, 0.0)
    exact = eager(experts, hidden_states, top_experts.clamp(max=NUM_EXPERTS - 1), mine)
    torch.testing.assert_close(output, exact, atol=1e-6, rtol=1e-5)
    assert top_experts.max() == NUM_EXPERTS, "the caller's indices were changed"


def test_no_tokens() -> None:
    experts = make_experts()
    hidden_states, top_experts, router_weights = make_inputs(0)
    output = experts(hidden_states.requires_grad_(), top_experts, router_weights)
    assert output.shape == (0, HIDDEN_SIZE)
    output.sum().backward()
    assert experts.gate_up_proj.grad.eq(0).all()


def test_non_contiguous_inputs() -> None:
    experts = make_experts()
    inputs = make_inputs()
    strided = [tensor.t().contiguous().t() for tensor in inputs]
    assert not any(tensor.is_contiguous() for tensor in strided)
    torch.testing.assert_close(experts(*strided), eager(experts, *inputs), atol=1e-6, rtol=1e-5)


def test_compiles_in_one_graph() -> None:
    experts = make_experts()
    inputs = make_inputs()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), eager(experts, *inputs), atol=1e-6, rtol=1e-5)


def test_clamp() -> None:
    sizes = {"hidden_size": HIDDEN_SIZE, "moe_intermediate_size": 16, "n_routed_experts": NUM_EXPERTS}
    config = AutoConfig.for_model("deepseek_v4", **sizes, swiglu_limit=0.5, experts_implementation="mok")
    experts = DeepseekV4Experts(config)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    inputs = make_inputs()
    output = experts(*inputs)
    torch.testing.assert_close(output, eager(experts, *inputs), atol=1e-6, rtol=1e-5)
    experts.limit = 1e3
    assert (experts(*inputs) - output).abs().max() > 1e-2, "nothing was clamped"


@pytest.mark.parametrize(
    ("cls", "family", "changes", "reason"),
    [
        (GptOssExperts, "gpt_oss", {"num_local_experts": 4}, "transposed"),
        (NemotronHExperts, "nemotron_h", {"n_routed_experts": 4}, "no gate"),
        (Gemma4TextExperts, "gemma4_text", {"num_experts": 4, "moe_intermediate_size": 16}, "activation"),
        (MiniMaxM3VLExperts, "minimax_m3_vl_text", {"num_local_experts": 4}, "_apply_gate"),
        (Qwen3MoeExperts, "qwen3_moe", {"hidden_act": "relu", "moe_intermediate_size": 16}, "activation"),
    ],
)
def test_refuses_by_name(cls: type[nn.Module], family: str, changes: dict, reason: str) -> None:
    config = AutoConfig.for_model(family, hidden_size=HIDDEN_SIZE, **changes, experts_implementation="mok")
    with pytest.raises(ValueError, match=rf"{cls.__name__}.*{reason}"):
        cls(config)(*make_inputs())


def test_lora_on_expert_parameters_moves_every_factor() -> None:
    peft = pytest.importorskip("peft")
    model = tiny.build("qwen3_moe", "mok")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=targets))
    factors = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(factors) == 2 * 2 * 2, "two layers, two parameters, two factors"
    before = {name: parameter.detach().clone() for name, parameter in factors.items()}
    optimizer = torch.optim.SGD(factors.values(), lr=0.1)
    inputs = {**tiny.batch(), "labels": tiny.batch()["input_ids"]}
    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    still = [name for name, parameter in factors.items() if torch.equal(parameter, before[name])]
    assert not still
    assert losses[-1] < losses[0]

    trained = model(**inputs).logits
    model.set_experts_implementation("eager")
    torch.testing.assert_close(model(**inputs).logits, trained, atol=1e-5, rtol=1e-5)
