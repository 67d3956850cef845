"""Activation checkpointing: a recomputed forward routes as the first one did, whatever its logits are then."""

import copy
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from mok import functional
from mok.nn import MoKLayer, MoKRouter
from mok.nn.replay import routing_memory

T, H, E, K = 40, 16, 6, 2

REGIONS = {
    "layer": lambda layer, x: layer(x),
    "in the middle": lambda layer, x: (x.sin() + layer(x.cos())).tanh(),
    "same layer twice": lambda layer, x: x + layer(layer(x).tanh()),
    "chunks": lambda layer, x: torch.cat([layer(chunk) for chunk in x.chunk(2)]).tanh(),
}


class Disturbed(MoKRouter):
    """Adds noise to its logits, other noise at each call."""

    noise = 0.0
    calls = 0

    def _logits(self, x: Tensor) -> Tensor:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        logits = super()._logits(x)
        return logits + self.noise * torch.randn(logits.shape, generator=generator)


class DisturbedForeign(nn.Module):
    """A router that knows nothing of replay."""

    def __init__(self, inner: Disturbed) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(self.inner(x))


def make_layer(foreign: bool = False, **options) -> tuple[MoKLayer, Disturbed]:
    torch.manual_seed(0)
    disturbed = Disturbed(H, E, K, **options)
    router = DisturbedForeign(disturbed) if foreign else disturbed
    return MoKLayer(H, 8, E, K, router=router, shared_intermediate_size=4, **options), disturbed


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Ids and weights that reach `mok.functional`, call by call."""
    calls, build_schedule, forward = [], functional.build_schedule, functional.forward

    def recorded_build_schedule(workspace, config, top_experts, **options):
        calls.append((top_experts.clone(), None))
        return build_schedule(workspace, config, top_experts, **options)

    def recorded_forward(config, workspace, schedule, x, router_weights, *arguments, **options):
        calls[-1] = (calls[-1][0], router_weights.clone())
        return forward(config, workspace, schedule, x, router_weights, *arguments, **options)

    monkeypatch.setattr(functional, "build_schedule", recorded_build_schedule)
    monkeypatch.setattr(functional, "forward", recorded_forward)
    return calls


def taken(seen: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What `seen` holds, which is then empty."""
    calls = list(seen)
    seen.clear()
    return calls


def train(layer, router, region, reentrant, noise, num_batches, at_once):
    """Forward and backward of each batch, or all forwards first. Returns the gradients."""
    torch.manual_seed(1)
    batches = [torch.randn(T, H, requires_grad=True) for _ in range(num_batches)]
    losses = []
    for x in batches:
        router.noise = 0.0
        y = region(layer, x) if reentrant is None else checkpoint(region, layer, x, use_reentrant=reentrant)
        losses.append(y.square().sum())
        router.noise = noise
        if not at_once:
            losses.pop().backward()
    if at_once:
        sum(losses).backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return grads | {f"x{i}": x.grad for i, x in enumerate(batches)}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("region", REGIONS)
def test_gradients_are_those_without_checkpointing(region, reentrant):
    expected = train(*make_layer(), REGIONS[region], None, 0.0, 2, False)
    grads = train(*make_layer(), REGIONS[region], reentrant, 0.0, 2, False)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("foreign", [False, True], ids=["MoKRouter", "foreign router"])
@pytest.mark.parametrize(("num_batches", "at_once"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("region", REGIONS)
def test_disturbed_recomputation_takes_the_first_routing(region, reentrant, num_batches, at_once, foreign, seen):
    expected = train(*make_layer(foreign), REGIONS[region], None, 0.0, num_batches, at_once)
    first = taken(seen)
    layer, router = make_layer(foreign)
    grads = train(layer, router, REGIONS[region], reentrant, 10.0, num_batches, at_once)

    assert len(seen) == 2 * len(first)  # each forward once, and once more
    left = taken(seen)
    for routing in 2 * first:
        match = next(i for i, other in enumerate(left) if all(map(torch.equal, routing, other)))
        left.pop(match)

    if region == "layer":  # the experts had the same inputs, so their gradients have the same bits
        for name in ("experts.gate_up_proj", "experts.down_proj", "shared_expert.up_proj.weight"):
            assert torch.equal(grads[name], expected[name]), name


def test_the_disturbance_does_flip_choices():
    """What the tests above would not show if the noise were too small."""
    layer, router = make_layer()
    x = torch.randn(T, H)
    before = layer.router(x).top_experts
    router.noise = 10.0
    assert (layer.router(x).top_experts != before).any(-1).float().mean() > 0.5


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_flip_at_a_tie_changes_no_gradient(reentrant):
    """Two experts with the same router weights; noise of one bit decides between them."""
    results = []
    for noise in (0.0, 1e-6):
        layer, router = make_layer(dtype=torch.float64)
        router.weight.data[1::2] = router.weight.data[::2]
        grads = train(*(layer, router), lambda layer, x: layer(x.double()), reentrant, noise, 1, False)
        results.append(grads)
    for name, grad in results[1].items():
        torch.testing.assert_close(grad, results[0][name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("early_stop", [False, True])
def test_with_and_without_early_stop(early_stop, seen):
    with set_checkpoint_early_stop(early_stop):
        train(*make_layer(), REGIONS["in the middle"], None, 0.0, 2, True)
        first = taken(seen)
        train(*make_layer(), REGIONS["in the middle"], False, 10.0, 2, True)
    for routing in first:
        assert sum(all(map(torch.equal, routing, other)) for other in seen) == 2


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the inner, under no_grad
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested(outer, inner, seen):
    def region(layer, x):
        return checkpoint(lambda x: layer(x).tanh(), x.sin().arcsin(), use_reentrant=inner)

    layer, router = make_layer()
    train(layer, router, lambda layer, x: layer(x.sin().arcsin()).tanh(), None, 0.0, 1, False)
    first = taken(seen)
    train(*make_layer(), region, outer, 10.0, 1, False)
    assert len(seen) >= 2
    for ids, weights in seen:
        assert torch.equal(ids, first[0][0]) and torch.equal(weights, first[0][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_twice(reentrant, seen):
    layer, router = make_layer()
    x = torch.randn(T, H, requires_grad=True)
    loss = checkpoint(REGIONS["in the middle"], layer, x, use_reentrant=reentrant).square().sum()
    router.noise = 10.0
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(seen) == 3
    assert all(torch.equal(ids, seen[0][0]) for ids, _ in seen)


def test_frozen_router_and_input(seen):
    """The first layer of a model whose experts alone are trained: no graph reaches the router."""
    layer, router = make_layer()
    router.requires_grad_(False)
    loss = checkpoint(REGIONS["in the middle"], layer, torch.randn(T, H), use_reentrant=False).sum()
    router.noise = 10.0
    loss.backward()
    assert len(seen) == 2 and torch.equal(seen[0][0], seen[1][0])


def test_padding_mask_is_replayed(seen):
    layer, router = make_layer()
    mask = torch.arange(T) % 3 > 0
    x = torch.randn(T, H, requires_grad=True)
    loss = checkpoint(layer, x, mask, use_reentrant=False).square().sum()
    router.noise = 10.0
    loss.backward()
    assert torch.equal(seen[0][0], seen[1][0]) and (seen[1][0][~mask] == -1).all()


def test_transformers_router(seen):
    class Config:
        num_experts_per_tok, num_experts, norm_topk_prob, hidden_size = K, E, True, H

    torch.manual_seed(0)
    router = Qwen3MoeTopKRouter(Config())
    router.weight.data.normal_()
    layer = MoKLayer(H, 8, E, K, router=router)
    plain = copy.deepcopy(layer)
    x = torch.randn(T, H, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False).square().sum()
    with torch.no_grad():
        flipped = router.weight.clone()
        flipped[0] += 3.0
        router.weight.data = flipped
    loss.backward()
    assert torch.equal(seen[0][0], seen[1][0])
    plain(x).square().sum().backward()
    assert torch.equal(layer.experts.down_proj.grad, plain.experts.down_proj.grad)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_nothing_is_remembered_for_longer_than_needed(reentrant):
    layer, _ = make_layer()
    memory = routing_memory(layer.experts)

    def remembered() -> int:
        return sum(ref() is not None for ref in memory._forwards)

    for _ in range(3):
        x = torch.randn(T, H, requires_grad=True)
        loss = layer(x).sum() if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant).sum()
        loss.backward()
        del loss
        assert remembered() <= (1 if reentrant else 0)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            layer(torch.randn(T, H))
    assert remembered() <= (1 if reentrant else 0)


@pytest.mark.parametrize("keeps", [False, True])
def test_policy_keeps_the_choice_under_compile(keeps):
    """The graph for backward chooses again only without it."""
    torch.manual_seed(0)
    layer = MoKLayer(H, 8, E, K)
    policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default])
    options = {"context_fn": policy} if keeps else {}
    graphs = []

    def record(graph: torch.fx.GraphModule, example_inputs: list[Tensor]):
        graphs.append({node.target for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False, **options), fullgraph=True, backend=backend
    )
    x = torch.randn(T, H, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(layer(x).square().sum(), x)[0])
    forward, backward = graphs
    assert torch.ops.aten.topk.default in forward
    assert (torch.ops.aten.topk.default in backward) == (not keeps)
