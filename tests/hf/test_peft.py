"""Adapters of experts go from mok to PEFT and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import mok.hf
from mok.nn import MoKExperts, MoKLayer, add_lora, merge_lora, remove_lora
from mok.testing import VirtualGroup, assert_close_rel_l2, assert_same_bits

peft = pytest.importorskip("peft")

TARGETS = ("experts.gate_up_proj", "experts.down_proj")


def converted(family: str = "qwen3_moe", **options: Any) -> PreTrainedModel:
    return mok.hf.convert(tiny.build(family), **options)


def randomise_lora(model: nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**tiny.batch()).logits


def peft_model(family: str = "qwen3_moe", **options: Any) -> Any:
    config = peft.LoraConfig(**{"r": 4, "target_modules": [], "target_parameters": list(TARGETS)} | options)
    model = peft.get_peft_model(tiny.build(family), config)
    randomise_lora(model)
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"use_rslora": True}),
        ("qwen3_moe", {"target_parameters": ["gate_up_proj"]}),
        ("qwen3_moe", {"target_parameters": ["down_proj"]}),
        ("mixtral", {}),
        ("granitemoe", {}),
        ("deepseek_v3", {}),
    ],
    ids=str,
)
def test_trained_here_loads_in_peft(family, options, tmp_path):
    model = converted(family).requires_grad_(False)
    before = logits(model)
    optimizer = torch.optim.AdamW(add_lora(model, 3, 6, **options), lr=0.05)
    inputs = tiny.batch()
    for _ in range(2):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mok.hf.save_lora(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(tiny.build(family), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    assert (logits(model) - before).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"lora_alpha": 6}),
        ("qwen3_moe", {"use_rslora": True}),
        ("qwen3_moe", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
        ("qwen3_moe", {"target_parameters": ["model.layers.1.mlp.experts.down_proj"]}),
        ("qwen3_moe", {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.1\..*gate_up_proj": 5}}),
        ("mixtral", {}),
    ],
    ids=str,
)
def test_trained_in_peft_loads_here(family, options, tmp_path):
    theirs = peft_model(family, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    mine = converted(family)
    parameters = mok.hf.load_lora(mine, tmp_path / "theirs")
    assert {id(p) for p in parameters} == {id(p) for name, p in mine.named_parameters() if "lora_" in name}
    torch.testing.assert_close(logits(mine), logits(theirs), atol=1e-5, rtol=1e-5)
    assert (logits(mine) - logits(tiny.build(family))).abs().max() > 0.1

    # Back again: the same file, and the gradient of a factor where PEFT has it.
    mok.hf.save_lora(mine, tmp_path / "mine")
    assert_same_files(tmp_path / "mine", tmp_path / "theirs")
    again = peft.PeftModel.from_pretrained(tiny.build(family), tmp_path / "mine", is_trainable=True)
    torch.testing.assert_close(logits(again), logits(theirs), atol=1e-5, rtol=1e-5)
    inputs = tiny.batch()
    for model in (mine, again):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    with torch.no_grad():
        for parameter in (*parameters, *again.parameters()):
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    mok.hf.save_lora(mine, tmp_path / "mine")
    again.save_pretrained(tmp_path / "theirs")
    assert_same_files(tmp_path / "mine", tmp_path / "theirs", 1e-4)


def assert_same_files(mine: Path, theirs: Path, tolerance: float = 0) -> None:
    mine, theirs = (load_file(path / "adapter_model.safetensors") for path in (mine, theirs))
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert_close_rel_l2(key, mine[key], tensor, tolerance)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_reads_its_own_experts(size, tmp_path):
    theirs = peft_model()
    theirs.save_pretrained(tmp_path / "theirs")
    models = [tiny.build("qwen3_moe") for _ in range(size)]

    def run(member: Any) -> Tensor:
        model = mok.hf.convert(models[member.rank()], process_group=member)
        parameters = mok.hf.load_lora(model, tmp_path / "theirs")
        assert {len(parameter) for parameter in parameters} == {tiny.NUM_EXPERTS // size}
        mok.hf.save_lora(model, tmp_path / "mine")
        with pytest.raises(ValueError, match=r"path: .* expected no adapters of gate_up_proj"):
            mok.hf.load_lora(model, tmp_path / "theirs")
        return logits(model)

    for result in VirtualGroup(size).run(run):
        torch.testing.assert_close(result, logits(theirs), atol=1e-5, rtol=1e-5)
    assert_same_files(tmp_path / "mine", tmp_path / "theirs")


def test_mistake_on_one_rank_raises_on_all(tmp_path):
    layer = MoKLayer(16, 8, 4, 2)
    add_lora(layer, 2)
    mok.hf.save_lora(layer, tmp_path / "0")
    config = tmp_path / "0" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 2', '"r": 3'))
    messages: list[str] = []

    def run(member: Any) -> None:
        layer = MoKLayer(16, 8, 4, 2, process_group=member)
        with pytest.raises(ValueError) as caught:
            mok.hf.load_lora(layer, tmp_path / str(member.rank()))
        messages.append(str(caught.value))
        assert layer.experts.lora is None

    VirtualGroup(2).run(run)
    assert messages[0] == messages[1]
    assert "rank 0: path: " in messages[0] and "lora_A.weight: expected [12, 16], got [8, 16]" in messages[0]
    assert "rank 1: path: " in messages[0] and "1/adapter_config.json" in messages[0]


def test_options_that_differ(tmp_path):
    """From parameter to parameter and from layer to layer, as far as PEFT can say so."""
    model = converted()
    first, second = (layer.mlp for layer in model.model.layers)
    add_lora(first, 2, 4, target_parameters=["down_proj"])
    add_lora(first, 4, 3, target_parameters=["gate_up_proj"], use_rslora=True)
    add_lora(second, 2, 4, target_parameters=["gate_up_proj", "down_proj"])
    randomise_lora(model)
    mok.hf.save_lora(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny.build("qwen3_moe"), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    again = converted()
    mok.hf.load_lora(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=1e-5)


def test_some_layers_only(tmp_path):
    model = converted()
    add_lora(model.model.layers[1])
    randomise_lora(model)
    mok.hf.save_lora(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names = [f"model.layers.1.mlp.{target}" for target in TARGETS]
    assert config["target_parameters"] == names
    theirs = peft.PeftModel.from_pretrained(tiny.build("qwen3_moe"), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)


def test_beside_adapters_of_peft(tmp_path):
    """Attention adapted by PEFT, which freezes all else, then experts by mok: both train, and each writes its own."""
    both = peft.get_peft_model(converted(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    add_lora(both, 2)
    randomise_lora(both)
    trained = {name for name, parameter in both.named_parameters() if parameter.requires_grad}
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in trained}
    assert adapted == {"q_proj", "v_proj", "gate_up_proj", "down_proj"}
    inputs = tiny.batch()
    both(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(both.get_parameter(name).grad.abs().max() > 0 for name in trained)
    mok.hf.save_lora(both, tmp_path / "experts")
    both.save_pretrained(tmp_path / "attention")
    again = peft.PeftModel.from_pretrained(converted(), tmp_path / "attention")
    mok.hf.load_lora(again, tmp_path / "experts")
    torch.testing.assert_close(logits(again), logits(both), atol=1e-5, rtol=1e-5)


def test_merged_models_are_models(tmp_path):
    model = converted()
    add_lora(model, 2, 4)
    randomise_lora(model)
    expected = logits(model)
    for write in (mok.hf.to_hf_state_dict, lambda model: mok.hf.save_pretrained(model, tmp_path)):
        with pytest.raises(ValueError, match=r"model: expected no adapters, got some in model.layers.0.mlp.experts"):
            write(model)
    merge_lora(model)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    mok.hf.save_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected, atol=1e-5, rtol=1e-5)


def test_a_layer_of_ones_own(tmp_path):
    torch.manual_seed(0)
    layer = MoKLayer(16, 8, 4, 2, dtype=torch.bfloat16)
    add_lora(layer, 4, 8, use_rslora=True)
    randomise_lora(layer)
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    y = layer(x)
    mok.hf.save_lora(layer, tmp_path)
    remove_lora(layer)
    mok.hf.load_lora(layer, tmp_path)
    assert_same_bits("y", layer(x), y)
    assert {lora.lora_A.dtype for lora in layer.experts.lora.values()} == {torch.float32}
    with pytest.raises(ValueError, match="model: expected a module that has the experts in it, got the experts"):
        mok.hf.save_lora(layer.experts, tmp_path)


def test_what_does_not_fit_is_named(tmp_path):
    peft_model().save_pretrained(tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, options = load_file(weights), json.loads(config.read_text())
    key = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    model = converted()

    def message(tensors: dict[str, Tensor] = tensors, **changes: Any) -> str:
        save_file(tensors, weights)
        config.write_text(json.dumps(options | changes))
        with pytest.raises(ValueError) as caught:
            mok.hf.load_lora(model, tmp_path)
        assert not any(experts.lora for experts in model.modules() if isinstance(experts, MoKExperts))
        start = f"path: {tmp_path} can not be loaded into Qwen3MoeForCausalLM: "
        assert str(caught.value).startswith(start)
        return str(caught.value).removeprefix(start)

    assert message(peft_type="LOHA") == "peft_type: expected LORA, got LOHA"
    assert message(target_parameters=None) == "target_parameters: expected names of experts, got None"
    assert message({k: t for k, t in tensors.items() if k != key}) == f"{key}: expected [32, 32], got no such key"
    assert message(r=3) == f"{key}: expected [24, 32], got [32, 32]"
    surplus = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert message(tensors | {surplus: torch.ones(2, 2)}) == f"expected adapters of experts only, got {surplus}"
    weights.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"path: .* can not be loaded"):
        mok.hf.load_lora(model, tmp_path)
    with pytest.raises(ValueError, match=r"path: .* can not be loaded .*adapter_config.json"):
        mok.hf.load_lora(model, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="model: expected experts with adapters in it, got none in Qwen3Moe"):
        mok.hf.save_lora(model, tmp_path)
    add_lora(model)
    with pytest.raises(ValueError, match=r"path: writing .* failed"):
        mok.hf.save_lora(model, weights)
