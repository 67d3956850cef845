"""`MoKLayer` over the simulated kernels: the whole way from a module to the GPU code and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_kernels import load_extension, simulated_kernels
from simulator import Simulator
from torch import Tensor

from mok.config import MoKConfig
from mok.nn import MoKLayer


def train_once(sim: Simulator, backend: str, wrap: Callable[[MoKLayer], Callable[[Tensor], Tensor]]) -> list[Tensor]:
    """Output, gradient of the input and of every parameter."""
    torch.manual_seed(0)
    with simulated_kernels(sim):
        config = MoKConfig(backend=backend)
        layer = MoKLayer(64, 64, 4, 2, shared_intermediate_size=64, config=config, dtype=torch.bfloat16)
        x = torch.randn(3, 7, 64, dtype=torch.bfloat16, requires_grad=True)
        y = wrap(layer)(x)
        y.float().square().sum().backward()
        with torch.no_grad():
            assert torch.equal(layer(x), y)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "wrap", [lambda layer: layer, lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True)],
    ids=["eager", "compiled"],
)  # fmt: skip
def test_a_training_step_of_the_layer(wrap: Callable[[MoKLayer], Callable[[Tensor], Tensor]]) -> None:
    load_extension()
    sim = Simulator()
    expected = train_once(sim, "torch", lambda layer: layer)
    actual = train_once(sim, "cuda", wrap)
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        error = (got.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 1e-2


def test_what_the_kernels_can_not_do() -> None:
    """float32 goes to the torch backend, or is an error where the kernels were asked for."""
    load_extension()
    outputs = []
    with simulated_kernels(Simulator()):
        for backend in (None, "torch", "cuda"):
            torch.manual_seed(0)
            layer = MoKLayer(64, 64, 4, 2, config=MoKConfig(backend=backend))
            x = torch.randn(9, 64, requires_grad=True)
            if backend == "cuda":
                with pytest.raises(ValueError, match=r'x: expected torch.bfloat16 with MoKConfig\(backend="cuda"\)'):
                    layer(x)
                continue
            layer(x).sum().backward()
            assert x.grad is not None
            outputs.append((layer(x), x.grad, layer.experts.down_proj.grad))
    for picked, wanted in zip(*outputs, strict=True):
        assert torch.equal(picked, wanted)


def test_gate_up_beyond_the_macrobatch_is_computed_again() -> None:
    load_extension()
    gradients = []
    with simulated_kernels(Simulator()):
        for config in (MoKConfig(backend="cuda"), MoKConfig(macrobatch_size=10, backend="cuda")):
            torch.manual_seed(0)
            layer = MoKLayer(64, 64, 4, 2, config=config, dtype=torch.bfloat16)
            layer(torch.randn(20, 64, dtype=torch.bfloat16)).float().square().sum().backward()
            gradients.append(layer.experts.gate_up_proj.grad)
    assert gradients[0] is not None and gradients[1] is not None
    error = (gradients[1].float() - gradients[0].float()).norm() / gradients[0].float().norm()
    assert error < 1e-3
