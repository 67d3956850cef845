"""Layers trained on the kernels for many steps: bits, loss and memory; on a GPU only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mok.config import MoKConfig
from mok.nn import MoKLayer
from mok.testing import assert_same_bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


def make_layers(count: int, backend: str, hidden_size: int, width: int, num_experts: int) -> nn.ModuleList:
    torch.manual_seed(0)
    config = MoKConfig(backend=backend)
    sizes = (hidden_size, width, num_experts, 2)
    layers = [
        MoKLayer(*sizes, shared_intermediate_size=width, dtype=torch.bfloat16, device=DEVICE, config=config)
        for _ in range(count)
    ]
    return nn.ModuleList(layers)


def run_layers(layers: nn.ModuleList, x: Tensor, use_reentrant: bool | None = None) -> Tensor:
    for layer in layers:
        x = x + (layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant))
    return x


def train(backend: str, steps: int) -> tuple[Tensor, list[Tensor]]:
    """The losses and the parameters after `steps` of Adam, which learn what other layers of this kind compute."""
    teacher, layers = (make_layers(2, backend, 256, 128, 16) for _ in range(2))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(512, 256, device=DEVICE, generator=generator).bfloat16()
        with torch.no_grad():
            target = run_layers(teacher, x)
        loss = (run_layers(layers, x).float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), list(layers.parameters())


def test_a_thousand_steps_twice_and_on_the_torch_backend() -> None:
    losses, parameters = train("cuda", 1000)
    losses_again, parameters_again = train("cuda", 1000)
    assert_same_bits("losses", losses, losses_again)
    for ours, again in zip(parameters, parameters_again, strict=True):
        assert_same_bits("parameter", ours, again)
    expected, _ = train("torch", 1000)
    assert losses[-50:].mean() < 0.8 * losses[:5].mean()
    for actual, wanted in zip(losses.view(-1, 50).mean(1), expected.view(-1, 50).mean(1), strict=True):
        assert abs(actual / wanted - 1) < 0.02


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_memory_of_48_layers_does_not_grow(use_reentrant: bool | None) -> None:
    layers = make_layers(48, "cuda", 256, 128, 16)
    allocated, peaks = [], []
    for _ in range(50):
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(512, 256, device=DEVICE).bfloat16().requires_grad_()
        run_layers(layers, x, use_reentrant).sum().backward()
        layers.zero_grad()
        del x
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        peaks.append(torch.cuda.max_memory_allocated())
    assert allocated[49] == allocated[1]
    assert peaks[49] == peaks[1]


def test_checkpointed_layer_keeps_nothing_routed() -> None:
    """Between forward and backward, a checkpointed layer holds its input and what makes the same routing again."""
    layers = make_layers(1, "cuda", 256, 512, 16)
    x = torch.randn(4096, 256, device=DEVICE).bfloat16().requires_grad_()

    def held(use_reentrant: bool | None) -> int:
        output = run_layers(layers, x, use_reentrant)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output.sum().backward()
        x.grad = None
        layers.zero_grad()
        output.detach_()
        return before - torch.cuda.memory_allocated()

    held(None), held(False)  # the first call of each makes buffers that stay
    routed_bytes = 4096 * 2 * 2 * 512 * 2  # T K 2I in bf16
    assert held(None) > routed_bytes
    assert held(False) < routed_bytes // 4


def gradients_of(layer: MoKLayer, run: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(run(x).float().square().sum(), [x, *layer.parameters()]))


def test_compile_fullgraph_gives_the_same_bits() -> None:
    layer = make_layers(1, "cuda", 256, 128, 16)[0]
    x = torch.randn(500, 256, device=DEVICE).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(gradients_of(layer, compiled, x), gradients_of(layer, layer, x), strict=True):
        assert_same_bits("gradient", actual, expected)


def test_captured_training_step_follows_its_input() -> None:
    layer = make_layers(1, "cuda", 256, 128, 16)[0]
    x = torch.randn(500, 256, device=DEVICE).bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients_of(layer, layer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients_of(layer, layer, x)
    for seed in range(3):
        x.normal_(generator=torch.Generator(device=DEVICE).manual_seed(seed))
        graph.replay()
        for actual, expected in zip(captured, gradients_of(layer, layer, x), strict=True):
            assert_same_bits("gradient", actual, expected)
