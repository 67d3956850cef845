"""Layers trained on the simulated kernels: autograd, checkpointing and frozen parts, against the torch backend."""

from __future__ import annotations

import pytest
import torch
from moe_kernels import simulated_kernels
from simulator import Simulator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mok.config import MoKConfig
from mok.nn import MoKLayer
from mok.testing import assert_same_bits, relative_l2

H, I, E, K, T = 64, 72, 6, 2, 48  # noqa: E741


def make_layer(backend: str) -> MoKLayer:
    torch.manual_seed(0)
    config = MoKConfig(backend=backend)
    return MoKLayer(H, I, E, K, shared_intermediate_size=40, dtype=torch.bfloat16, config=config)


def train(
    backend: str, frozen: str | None = None, *, steps: int = 3, use_reentrant: bool | None = None
) -> list[Tensor]:
    """Losses, then the parameters, after some steps of gradient descent on a fixed target."""
    layer = make_layer(backend)
    if frozen is not None:
        layer.get_submodule(frozen).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(T, H, generator=generator).bfloat16() for _ in range(2))
    x.requires_grad_()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    losses = []
    for _ in range(steps):
        output = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
        loss = (output.float() - target.float()).square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in trained:
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    assert x.grad is not None
    return [*losses, x.grad, *[parameter.detach() for parameter in layer.parameters()]]


def train_simulated(frozen: str | None = None, *, seed: int = 0, use_reentrant: bool | None = None) -> list[Tensor]:
    sim = Simulator(seed=seed)
    with simulated_kernels(sim):
        results = train("cuda", frozen, use_reentrant=use_reentrant)
    sim.raise_reports()
    return results


@pytest.mark.parametrize("frozen", [None, "experts", "router", "shared_expert"])
def test_training_is_that_of_the_torch_backend(frozen: str | None) -> None:
    for actual, expected in zip(train_simulated(frozen), train("torch", frozen), strict=True):
        assert relative_l2(actual, expected) < 1e-2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(use_reentrant: bool) -> None:
    results = train_simulated(seed=1, use_reentrant=use_reentrant)
    for actual, expected in zip(results, train_simulated(), strict=True):
        assert_same_bits("result", actual, expected)


def test_stride_zero_gradient() -> None:
    grads = []
    for backend in ("cuda", "torch"):
        sim = Simulator(seed=0)
        with simulated_kernels(sim):
            layer = make_layer(backend)
            layer(torch.ones(5, H, dtype=torch.bfloat16)).sum().backward()
        sim.raise_reports()
        grads.append([parameter.grad for parameter in layer.parameters()])
    for actual, expected in zip(*grads, strict=True):
        assert relative_l2(actual, expected) < 1e-2
