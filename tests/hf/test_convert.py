"""Converted models: sharing, refusals, training, and everything that transformers and PEFT do with a model."""

import copy
import pickle
from collections.abc import Callable

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import mok.hf
from mok.nn import MoKExperts, MoKLayer
from mok.testing import VirtualGroup, assert_close_rel_l2


def blocks(model: nn.Module) -> list[MoKLayer]:
    return [module for module in model.modules() if isinstance(module, MoKLayer)]


def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(**tiny.batch()).logits


def test_parameters_are_shared_not_copied() -> None:
    model = tiny.build("deepseek_v3")
    before = dict(model.named_parameters())
    assert mok.hf.convert(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    layer = blocks(model)[0]
    assert layer.router is layer.gate
    assert layer.shared_expert is layer.shared_experts


def test_ranks_keep_only_their_experts() -> None:
    model = tiny.build("qwen3_moe")
    gate_up_proj = model.model.layers[0].mlp.experts.gate_up_proj
    parts = VirtualGroup(4).run(lambda member: mok.hf.convert(tiny.clone(model), process_group=member))
    mine = [part.model.layers[0].mlp.experts.gate_up_proj for part in parts]
    assert torch.equal(torch.cat(mine), gate_up_proj)
    assert all(part.untyped_storage().nbytes() * 4 == gate_up_proj.untyped_storage().nbytes() for part in mine)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_expert_parallel_gives_what_one_rank_gives(family: str) -> None:
    """All ranks see one batch, so each expert's gradient is the sum of equal parts."""
    model = tiny.build(family)
    alone = mok.hf.convert(tiny.clone(model))
    expected = tiny.run(alone)
    experts = {f"{name}." for name, module in alone.named_modules() if isinstance(module, MoKExperts)}

    def rank(member) -> tiny.Run:
        return tiny.run(mok.hf.convert(tiny.clone(model), process_group=member))

    for number, run in enumerate(VirtualGroup(2).run(rank)):
        torch.testing.assert_close(run.output, expected.output, atol=1e-5, rtol=1e-5)
        for name, theirs in expected.grads.items():
            if name.rpartition(".")[0] + "." in experts:
                theirs = 2 * theirs.chunk(2)[number]
            assert_close_rel_l2(name, run.grads[name], theirs, 1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mixtral", {"router_jitter_noise": 0.3}), ("phimoe", {"input_jitter_noise": 0.3, "router_jitter_noise": 0.0})],
)
def test_training_jitter_is_the_same_noise(family: str, changes: dict) -> None:
    model = tiny.build(family, **changes).train()
    converted = mok.hf.convert(tiny.clone(model)).train()
    torch.manual_seed(2)
    expected = tiny.run(model)
    torch.manual_seed(2)
    tiny.assert_same(tiny.run(converted), expected)
    assert (tiny.run(converted.eval()).output - expected.output).abs().max() > 1e-3, "no noise was there"


def _dense() -> PreTrainedModel:
    config = {key: value for key, value in tiny.CONFIGS["olmoe"].items() if "expert" not in key}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config))


def _hooked() -> PreTrainedModel:
    model = tiny.build("qwen3_moe")
    model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
    return model


def _quantised() -> PreTrainedModel:
    model = tiny.build("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.to(torch.int8), requires_grad=False)
    return model


def _experts_in_decoder_layer() -> PreTrainedModel:
    heads = {**tiny.CONFIGS["qwen3_moe"], "top_k_experts": 2, "enable_moe_block": True}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **heads))


def _gpt_oss() -> PreTrainedModel:
    config = {**tiny.CONFIGS["mixtral"], "layer_types": ["full_attention"] * 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **config))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_dense, "LlamaForCausalLM: no MoE block"),
        (_hooked, r"model\.layers\.1\.mlp.*Qwen3MoeSparseMoeBlock.*hook"),
        (_experts_in_decoder_layer, "Gemma4TextExperts"),
        (_gpt_oss, r"model\.layers\.0\.mlp.*GptOss"),
        (lambda: tiny.build("qwen3_moe", hidden_act="gelu"), "Qwen3MoeExperts.*activation"),
        (lambda: mok.hf.convert(tiny.build("qwen3_moe")), "already"),
        (_quantised, "torch.int8"),
    ],
)
def test_refuses_by_name(make: Callable[[], PreTrainedModel], message: str) -> None:
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        mok.hf.convert(model)
    assert [type(module) for module in model.modules()] == before, "it was changed nevertheless"


def test_experts_must_divide_by_the_group() -> None:
    with pytest.raises(ValueError, match=r"8 experts.* 3 ranks"):
        VirtualGroup(3).run(lambda member: mok.hf.convert(tiny.build("qwen3_moe"), process_group=member))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    model = tiny.build("qwen2_moe").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    expected = tiny.run(tiny.clone(model))
    tiny.assert_same(tiny.run(mok.hf.convert(model)), expected)


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "qwen3_next"])
def test_generates_the_same_text_with_and_without_cache(family: str) -> None:
    model = tiny.build(family)
    converted = mok.hf.convert(tiny.clone(model))
    arguments = {**tiny.batch(), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**arguments)
    assert torch.equal(converted.generate(**arguments), expected)
    assert torch.equal(converted.generate(**arguments, use_cache=False), expected)


def test_compiles_in_one_graph() -> None:
    model = mok.hf.convert(tiny.build("deepseek_v3"))
    expected = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tiny.batch()).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_survives_being_copied(again: Callable[[nn.Module], nn.Module]) -> None:
    model = mok.hf.convert(tiny.build("deepseek_v3"))
    twin = again(model)
    assert torch.equal(logits(twin), logits(model))
    blocks(twin)[0].experts.down_proj.data.zero_()
    assert not torch.equal(logits(twin), logits(model))


def test_trains_and_resizes() -> None:
    model = mok.hf.convert(tiny.build("qwen3_moe")).train()
    model.resize_token_embeddings(tiny.VOCAB_SIZE + 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    inputs = {**tiny.batch(), "labels": tiny.batch()["input_ids"]}
    losses = []
    for _ in range(4):
        loss = model(**inputs, output_router_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {"target_modules": r".*shared_experts\.(gate|up|down)_proj"},
    ],
    ids=["experts", "shared"],
)
def test_lora_after_conversion(targets: dict) -> None:
    """An adapter on the experts, or inside the shared expert, does what it does in transformers' own block."""
    peft = pytest.importorskip("peft")
    outputs = []
    for convert in (lambda model: model, mok.hf.convert):
        model = peft.get_peft_model(convert(tiny.build("deepseek_v3")), peft.LoraConfig(r=2, **targets))
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.2)
        loss = model(**tiny.batch(), labels=tiny.batch()["input_ids"]).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        outputs.append((loss.detach(), grads))
    (theirs, their_grads), (mine, my_grads) = outputs
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert my_grads.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        assert_close_rel_l2(name, my_grads[name], grad, 1e-5)
