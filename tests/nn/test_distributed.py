"""MoKLayer in several processes: expert parallelism, DDP and FSDP2, each over two gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mok.nn import MoKExperts, MoKLayer, RouterLosses, load_balancing_loss
from mok.testing import assert_close_rel_l2, assert_same_bits

H, E, K = 16, 6, 2

Results = dict[str, Tensor]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("gloo"))
    yield ranks
    ranks.stop()


def make_layer(**options) -> MoKLayer:
    torch.manual_seed(0)
    return MoKLayer(H, 8, E, K, shared_intermediate_size=4, **options)


def batches(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(sum(sizes), H).to(dtype).split(sizes))


def call(layer: torch.nn.Module, x: Tensor, use_checkpoint: bool = False) -> Results:
    """Output and gradients of everything."""
    x = x.clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False) if use_checkpoint else layer(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return {"y": y.detach(), "x.grad": x.grad} | gradients


# Expert parallelism


def expert_parallel(rank: int, sizes: list[int], dtype: torch.dtype, use_checkpoint: bool) -> Results:
    torch.set_num_threads(1)
    layer = make_layer(process_group=dist.group.WORLD, dtype=dtype)
    assert layer.experts.gate_up_proj.shape[0] == E // 2 and layer.experts.first_expert == rank * (E // 2)
    return call(layer, batches(sizes, dtype)[rank], use_checkpoint)


@pytest.mark.parametrize(
    ("sizes", "dtype", "use_checkpoint"),
    [
        ([24, 24], torch.float32, False),
        ([24, 24], torch.bfloat16, False),
        ([31, 5], torch.float32, False),
        ([0, 17], torch.float32, False),
        ([17, 0], torch.float32, True),
        ([0, 0], torch.float32, False),
    ],
    ids=str,
)
def test_expert_parallel_gives_the_bits_of_one_process(ranks, sizes, dtype, use_checkpoint):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = call(make_layer(dtype=dtype), torch.cat(batches(sizes, dtype)))
    torch.set_num_threads(threads)
    results = ranks.run(expert_parallel, sizes, dtype, use_checkpoint)
    for name in ("y", "x.grad", "experts.gate_up_proj", "experts.down_proj"):
        assert_same_bits(name, torch.cat([result[name] for result in results]), expected[name])
    for name in expected.keys() - {"y", "x.grad", "experts.gate_up_proj", "experts.down_proj"}:
        # Of each rank's own tokens: to be summed by whoever does data parallelism, in another order than here.
        tolerance = 4 * torch.finfo(dtype).eps
        assert_close_rel_l2(name, sum(result[name] for result in results), expected[name], tolerance)


def growing_batches(rank: int) -> list[Tensor]:
    layer = make_layer(process_group=dist.group.WORLD)
    outputs = []
    for own, other in ((3, 9), (9, 3), (40, 1), (2, 2), (0, 50)):
        torch.manual_seed(own + other)
        x = torch.randn(own + other, H)
        x = x[:own] if rank == 0 else x[own:]
        outputs.append(layer(x).detach())
    return outputs


def test_workspace_grows_alike_on_all_ranks(ranks):
    layer = make_layer()
    first, second = ranks.run(growing_batches)
    for i, num_tokens in enumerate((12, 12, 41, 4, 50)):
        torch.manual_seed(num_tokens)
        torch.testing.assert_close(torch.cat([first[i], second[i]]), layer(torch.randn(num_tokens, H)))


def share_of_loss(rank: int) -> tuple[Tensor, Tensor]:
    layer = make_layer()
    losses = RouterLosses(E, dist.group.WORLD)
    losses.add(layer.router(batches([20, 9], torch.float32)[rank]))
    loss = losses.load_balancing_loss()
    loss.backward()
    assert layer.router.weight.grad is not None
    return loss.detach(), layer.router.weight.grad


def test_shares_of_the_loss(ranks):
    shares, gradients = zip(*ranks.run(share_of_loss), strict=True)
    layer = make_layer()
    loss = load_balancing_loss(layer.router(torch.cat(batches([20, 9], torch.float32))))
    loss.backward()
    torch.testing.assert_close(sum(shares), loss.detach())
    torch.testing.assert_close(sum(gradients), layer.router.weight.grad)


def errors(rank: int) -> list[str]:
    """What each rank says about a mistake that only rank 1 makes."""
    layer = make_layer(process_group=dist.group.WORLD)
    wrong = rank == 1
    x, ids, weights = torch.randn(5, H), torch.zeros(5, K, dtype=torch.int64), torch.rand(5, K)
    mistakes = [
        lambda: layer(torch.randn(5, H - 1) if wrong else x),
        lambda: layer(x, torch.ones(4 if wrong else 5, dtype=torch.bool)),
        lambda: layer.experts(x, ids[1:] if wrong else ids, weights),
        lambda: layer.experts(x, ids + E if wrong else ids, weights),
        lambda: layer.experts(x, ids, weights[1:] if wrong else weights),
        lambda: layer.experts(x, ids[:, :1] if wrong else ids, weights[:, :1] if wrong else weights),
    ]
    messages = []
    for mistake in mistakes:
        try:
            mistake()
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    try:
        MoKExperts(E + 1, H, 8, process_group=dist.group.WORLD)
    except ValueError as error:
        messages.append(str(error))
    messages.append(str(layer(x).isfinite().all().item()))  # the ranks are still in step
    return messages


def test_mistake_on_one_rank_raises_on_all(ranks):
    first, second = ranks.run(errors)
    assert first == second
    expected = [
        "rank 1: hidden_states: expected [..., 16], got torch.float32 [5, 15]",
        "rank 1: padding_mask: expected torch.bool [5]",
        "rank 1: top_experts: expected torch.int64 or torch.int32 [5, K]",
        "rank 1: top_experts: expected ids from -1 (dropped) to 5, got 6 to 6",
        "rank 1: router_weights: expected torch.float32 [5, 2]",
        "top_k: expected the same on every rank, got rank 0: 2; rank 1: 1",
        "num_experts: expected a multiple of the 2 ranks, got 7",
        "True",
    ]
    for message, start in zip(first, expected, strict=True):
        assert message.startswith(start), message


# Data parallelism


def data_parallel(rank: int) -> Results:
    layer = make_layer()
    wrapped = DistributedDataParallel(layer)
    wrapped(batches([12, 12], torch.float32)[rank]).square().sum().backward()
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def test_ddp(ranks):
    layer = make_layer()
    layer(torch.cat(batches([12, 12], torch.float32))).square().sum().backward()
    for result in ranks.run(data_parallel):
        for name, parameter in layer.named_parameters():
            assert_close_rel_l2(name, 2 * result[name], parameter.grad, 1e-5)  # DDP takes the mean


def ddp_around_expert_parallel(rank: int) -> Results:
    """Gradients of the experts are whole as they are; DDP averages the rest."""
    layer = make_layer(process_group=dist.group.WORLD)
    experts = [f"experts.{name}" for name, _ in layer.experts.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, experts)
    wrapped = DistributedDataParallel(layer)
    wrapped(batches([12, 12], torch.float32)[rank]).square().sum().backward()
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def test_ddp_around_expert_parallel(ranks):
    layer = make_layer()
    layer(torch.cat(batches([12, 12], torch.float32))).square().sum().backward()
    results = ranks.run(ddp_around_expert_parallel)
    for name, parameter in layer.named_parameters():
        if name.startswith("experts."):
            assert_close_rel_l2(name, torch.cat([result[name] for result in results]), parameter.grad, 1e-5)
        else:
            assert_close_rel_l2(name, 2 * results[0][name], parameter.grad, 1e-5)


def fully_sharded(rank: int, children_too: bool, use_checkpoint: bool) -> Results:
    with torch.device("meta"):
        layer = make_layer()
    if children_too:
        for child in (layer.router, layer.experts, layer.shared_expert):
            fully_shard(child)
    fully_shard(layer)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in layer.modules():
        if isinstance(module, MoKExperts):
            module.reset_parameters()
    whole = make_layer()
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, DTensor)
        if not name.startswith("experts."):
            shard = torch.distributed.tensor.distribute_tensor(
                whole.get_parameter(name).detach(), parameter.device_mesh, parameter.placements
            )
            parameter.data.copy_(shard)
    results = call(layer, batches([12, 12], torch.float32)[rank], use_checkpoint)
    initial = {name: parameter.full_tensor().detach() for name, parameter in layer.named_parameters()}
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    stepped = {name: parameter.full_tensor().detach() for name, parameter in layer.named_parameters()}
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in results.items()}
    return (
        full
        | {f"initial {name}": value for name, value in initial.items()}
        | {f"stepped {name}": value for name, value in stepped.items()}
    )


@pytest.mark.parametrize("children_too", [False, True])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_fsdp2(ranks, children_too, use_checkpoint):
    layer = make_layer()
    torch.manual_seed(0)
    layer.experts.reset_parameters()
    initial = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    expected = call(layer, torch.cat(batches([12, 12], torch.float32)))
    results = ranks.run(fully_sharded, children_too, use_checkpoint)
    assert_close_rel_l2("y", torch.cat([result["y"] for result in results]), expected["y"], 1e-5)
    for name, parameter in layer.named_parameters():
        for result in results:
            assert torch.equal(result[f"initial {name}"], initial[name]), name
            assert_close_rel_l2(name, 2 * result[name], expected[name], 1e-5)  # FSDP takes the mean
            stepped = initial[name] - 0.05 * parameter.grad
            assert_close_rel_l2(f"stepped {name}", result[f"stepped {name}"], stepped, 1e-5)
