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
