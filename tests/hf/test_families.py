"""Every canonical family: the same logits, loss and gradients as transformers' own experts, in files and in memory."""

from unittest import mock

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import mok.hf.experts
from mok.nn import MoKLayer


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def eager(family: str) -> PreTrainedModel:
    return tiny.build(family)


@pytest.fixture(scope="module")
def expected(eager: PreTrainedModel) -> tiny.Run:
    return tiny.run(eager)


def test_registered(eager: PreTrainedModel, expected: tiny.Run) -> None:
    mok.hf.register()
    model = tiny.clone(eager)
    model.set_experts_implementation("mok")
    with mock.patch("mok.hf.experts.moe", wraps=mok.hf.experts.moe) as moe:
        tiny.assert_same(tiny.run(model), expected)
    assert moe.called


def test_converted(eager: PreTrainedModel, expected: tiny.Run) -> None:
    model = mok.hf.convert(tiny.clone(eager))
    assert any(isinstance(module, MoKLayer) for module in model.modules())
    assert model.state_dict().keys() == eager.state_dict().keys()
    tiny.assert_same(tiny.run(model), expected)


def test_files(eager: PreTrainedModel, expected: tiny.Run, tmp_path) -> None:
    """What a converted model writes is what transformers writes; both sides read it back, bit for bit."""
    eager.save_pretrained(tmp_path / "theirs")
    mok.hf.save_pretrained(mok.hf.convert(tiny.clone(eager)), tmp_path / "ours")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    reloaded = type(eager).from_pretrained(tmp_path / "ours", experts_implementation="eager").to(eager.dtype)
    torch.testing.assert_close(tiny.run(reloaded).output, expected.output, atol=1e-5, rtol=1e-5)

    with torch.device("meta"):
        empty = mok.hf.convert(type(eager)(tiny.clone(eager).config)).to(eager.dtype).eval()
    mok.hf.load_checkpoint(empty, tmp_path / "theirs")
    for name, tensor in eager.state_dict().items():
        assert torch.equal(empty.state_dict()[name], tensor), name
    torch.testing.assert_close(tiny.run(empty).output, expected.output, atol=1e-5, rtol=1e-5)
