"""Reading and writing checkpoints: layouts, expert parallelism, and what is wrong with a bad one."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import mok.hf
from mok.hf import checkpoint
from mok.nn import MoKLayer
from mok.testing import VirtualGroup, assert_same_bits

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_EXPERTS = 16, 8, 4
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def make_layer(**arguments) -> MoKLayer:
    return MoKLayer(HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_EXPERTS, 2, shared_intermediate_size=12, **arguments)


def block_tensors(style: str) -> dict[str, Tensor]:
    """A random block as some family has it on disk."""
    torch.manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE)
    down = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
    shared = {
        f"shared_experts.{name}.weight": torch.randn(shape)
        for name, shape in (
            ("gate_proj", (12, HIDDEN_SIZE)),
            ("up_proj", (12, HIDDEN_SIZE)),
            ("down_proj", (HIDDEN_SIZE, 12)),
        )
    }
    router = {"gate.weight": torch.randn(NUM_EXPERTS, HIDDEN_SIZE)}
    if style == "stacked":
        return {GATE_UP: gate_up, DOWN: down, **router, **shared}
    names = {"Q": ("gate_proj", "up_proj", "down_proj"), "M": ("w1", "w3", "w2")}[style]
    experts = {}
    for number in range(NUM_EXPERTS):
        parts = *gate_up[number].chunk(2), down[number]
        experts |= {f"experts.{number}.{name}.weight": part.clone() for name, part in zip(names, parts, strict=True)}
    return {**experts, **router, **shared}


def write(path: Path, tensors: dict[str, Tensor], prefix: str = "model.layers.0.mlp.", num_files: int = 1) -> Path:
    """One file, or several with an index."""
    path.mkdir(exist_ok=True)
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if num_files == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for i in range(num_files):
        part = dict(list(tensors.items())[i::num_files])
        save_file(part, path / f"part{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{i}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("style", ["Q", "M", "stacked"])
def test_layer_reads_every_style(style: str, num_files: int, tmp_path: Path) -> None:
    tensors = {**block_tensors(style), "other.weight": torch.zeros(1)}
    tensors = {f"model.layers.{i}.mlp.{name}": tensor + i for i in (0, 1) for name, tensor in tensors.items()}
    del tensors["model.layers.0.mlp.other.weight"]
    write(tmp_path, tensors, "", num_files)
    layer = make_layer()
    mok.hf.load_checkpoint(layer, tmp_path, prefix="model.layers.0.mlp")
    expected = block_tensors("stacked")
    assert torch.equal(layer.experts.gate_up_proj, expected[GATE_UP])
    assert torch.equal(layer.experts.down_proj, expected[DOWN])
    assert torch.equal(layer.router.weight, expected["gate.weight"])
    assert torch.equal(layer.shared_expert.down_proj.weight, expected["shared_experts.down_proj.weight"])


@pytest.mark.parametrize("style", ["Q", "stacked"])
def test_a_rank_reads_its_experts_only(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, block_tensors(style))
    num_read: dict[int, int] = {}
    read = checkpoint._read

    def counting(tensor, part: slice, *, meta: bool) -> Tensor:
        value = read(tensor, part, meta=meta)
        if not meta and value.shape[-2:] != (NUM_EXPERTS, HIDDEN_SIZE):
            num_read[value.numel()] = num_read.get(value.numel(), 0) + 1
        return value

    def load(member) -> MoKLayer:
        layer = make_layer(process_group=member, device="meta")
        mok.hf.load_checkpoint(layer, tmp_path, prefix="model.layers.0.mlp")
        return layer

    group = VirtualGroup(2)
    monkeypatch.setattr(checkpoint, "_read", counting)
    layers = group.run(load)
    expected = block_tensors("stacked")
    assert torch.equal(torch.cat([layer.experts.gate_up_proj for layer in layers]), expected[GATE_UP])
    assert torch.equal(torch.cat([layer.experts.down_proj for layer in layers]), expected[DOWN])
    total = sum(numel * count for numel, count in num_read.items())
    shared = sum(tensor.numel() for name, tensor in expected.items() if name.startswith("shared"))
    assert total == expected[GATE_UP].numel() + expected[DOWN].numel() + 2 * shared


def test_values_are_cast_to_the_parameters(tmp_path: Path) -> None:
    tensors = block_tensors("Q")
    write(tmp_path, tensors)
    layer = make_layer(dtype=torch.bfloat16)
    mok.hf.load_checkpoint(layer, tmp_path / "model.safetensors", prefix="model.layers.0.mlp")
    assert torch.equal(layer.router.weight, tensors["gate.weight"].to(layer.router.weight.dtype))
    assert layer.experts.down_proj.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen3_vl_moe_text"])
def test_saved_at_2_ranks_read_at_1_and_4(family: str, tmp_path: Path) -> None:
    model = tiny.build(family)

    def save(member) -> dict[str, Tensor]:
        part = mok.hf.convert(tiny.clone(model), process_group=member)
        mok.hf.save_pretrained(part, tmp_path)
        return mok.hf.to_hf_state_dict(part)

    saved = VirtualGroup(2).run(save)
    files = load_file(tmp_path / "model.safetensors")
    for whole in saved:
        assert whole.keys() == files.keys()
        for name, tensor in files.items():
            assert_same_bits(name, whole[name], tensor)

    def read(member=None) -> PreTrainedModel:
        with torch.device("meta"):
            empty = mok.hf.convert(type(model)(tiny.clone(model).config), process_group=member)
        mok.hf.load_checkpoint(empty, tmp_path)
        return empty.eval()

    expected = model.state_dict()
    for name, tensor in read().state_dict().items():
        assert_same_bits(name, tensor, expected[name])
    parts = VirtualGroup(4).run(lambda member: read(member).state_dict())
    for name, tensor in expected.items():
        is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        whole = torch.cat([part[name] for part in parts]) if is_expert else parts[3][name]
        assert_same_bits(name, whole, tensor)


def test_sharded_files_of_a_model(tmp_path: Path) -> None:
    model = tiny.build("qwen2_moe")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    other = tiny.build("qwen2_moe", initializer_range=0.1)
    mok.hf.load_checkpoint(mok.hf.convert(other), tmp_path)
    for name, tensor in model.state_dict().items():
        assert_same_bits(name, other.state_dict()[name], tensor)


def test_tied_embeddings_from_meta(tmp_path: Path) -> None:
    model = tiny.build("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = mok.hf.convert(type(model)(tiny.clone(model).config))
    mok.hf.load_checkpoint(empty.eval(), tmp_path)
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    torch.testing.assert_close(empty(**tiny.batch()).logits, model(**tiny.batch()).logits, atol=1e-5, rtol=1e-5)


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["experts.2.up_proj.weight"], tensors["gate.weight"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors |= {"experts.4.up_proj.weight": torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE), "scale_inv": torch.zeros(1)}


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors["gate.weight"] = torch.zeros(NUM_EXPERTS, 5)
    tensors["experts.1.down_proj.weight"] = torch.zeros(HIDDEN_SIZE, 3)


def _no_up(tensors: dict[str, Tensor]) -> None:
    for number in range(NUM_EXPERTS):
        del tensors[f"experts.{number}.up_proj.weight"]


@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (_drop, [r"missing \(2\)", r"mlp\.experts\.2\.up_proj\.weight", r"mlp\.router\.weight"]),
        (_add, [r"surplus \(2\)", r"mlp\.experts\.4\.up_proj\.weight", r"mlp\.scale_inv"]),
        (
            _reshape,
            [r"router\.weight \(expected \[4, 16\], got \[4, 5\]\)", r"experts\.1\.down_proj\.weight \[16, 3\]"],
        ),
        (_no_up, [rf"mlp\.experts\.{number}\.up_proj\.weight" for number in range(NUM_EXPERTS)]),
    ],
)
def test_one_error_lists_all_that_is_wrong(spoil, wanted: list[str], tmp_path: Path) -> None:
    tensors = block_tensors("Q")
    spoil(tensors)
    write(tmp_path, tensors)
    layer = make_layer()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(ValueError, match=r"^path: .* does not fit MoKLayer") as caught:
        mok.hf.load_checkpoint(layer, tmp_path, prefix="model.layers.0.mlp")
    for pattern in wanted:
        assert caught.match(pattern)
    for name, tensor in layer.state_dict().items():
        assert_same_bits(name, tensor, before[name])


def test_a_wrong_expert_is_named_on_the_rank_that_owns_it(tmp_path: Path) -> None:
    tensors = block_tensors("Q")
    tensors["experts.3.up_proj.weight"] = torch.zeros(INTERMEDIATE_SIZE, 5)
    write(tmp_path, tensors)

    def load(member) -> None:
        layer = make_layer(process_group=member)
        with pytest.raises(ValueError, match=r"(?s)rank 1: .*experts\.3\.up_proj\.weight \[8, 5\]"):
            mok.hf.load_checkpoint(layer, tmp_path, prefix="model.layers.0.mlp")

    VirtualGroup(2).run(load)


def test_a_truncated_file_is_named_and_every_rank_raises(tmp_path: Path) -> None:
    write(tmp_path / "whole", block_tensors("Q"))
    write(tmp_path / "cut", block_tensors("Q"))
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    def load(member) -> None:
        path = tmp_path / ("whole" if member.rank() == 0 else "cut")
        with pytest.raises(ValueError, match=r"(?s)rank 1: .*unreadable \(1\): model.safetensors"):
            mok.hf.load_checkpoint(make_layer(process_group=member), path, prefix="model.layers.0.mlp")

    VirtualGroup(2).run(load)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"unreadable \(1\): model.safetensors: "),
        (lambda path: (path / "model.safetensors.index.json").write_text("{}"), r"unreadable \(1\): .*index.json"),
        (lambda path: write(path, block_tensors("Q"), num_files=2) / "part1.safetensors", "unreadable"),
    ],
    ids=["no file", "bad index", "part gone"],
)
def test_files_that_are_not_there(make, message: str, tmp_path: Path) -> None:
    gone = make(tmp_path)
    if isinstance(gone, Path):
        gone.unlink()
    with pytest.raises(ValueError, match=message):
        mok.hf.load_checkpoint(make_layer(), tmp_path, prefix="model.layers.0.mlp")


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    write(tmp_path, block_tensors("Q"), num_files=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.mlp.lost"] = "part0.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"mlp\.lost \(promised in part0.safetensors\)"):
        mok.hf.load_checkpoint(make_layer(), tmp_path, prefix="model.layers.0.mlp")


def test_a_prefix_that_is_not_there_lists_every_parameter(tmp_path: Path) -> None:
    write(tmp_path, block_tensors("Q"))
    layer = make_layer()
    with pytest.raises(ValueError) as caught:
        mok.hf.load_checkpoint(layer, tmp_path, prefix="model.layers.7.mlp")
    assert all(f"model.layers.7.mlp.{name}" in str(caught.value) for name, _ in layer.named_parameters())


def test_a_model_that_lacks_a_tensor_lists_it(tmp_path: Path) -> None:
    model = tiny.build("qwen3_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.experts.5.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \(2\)") as caught:
        mok.hf.load_checkpoint(mok.hf.convert(model), tmp_path)
    assert caught.match(r"model\.norm\.weight") and caught.match(r"layers\.1\.mlp\.experts\.5\.down_proj\.weight")


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"layer_or_model: .* got Linear"):
        mok.hf.load_checkpoint(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(ValueError, match="prefix"):
        mok.hf.load_checkpoint(tiny.build("qwen3_moe"), tmp_path, prefix="model")
    for call in (mok.hf.to_hf_state_dict, lambda model: mok.hf.save_pretrained(model, tmp_path)):
        with pytest.raises(TypeError, match=r"model: expected PreTrainedModel, got MoKLayer"):
            call(make_layer())


def test_a_failed_write_raises_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = tiny.build("qwen3_moe")

    def save(member) -> None:
        part = mok.hf.convert(tiny.clone(model), process_group=member)
        with pytest.raises(ValueError, match=r"path: writing .* failed"):
            mok.hf.save_pretrained(part, tmp_path / "file" / "below")

    VirtualGroup(2).run(save)
