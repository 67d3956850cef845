"""The project's backward kernel, in the simulator, against the torch backend: every gradient by name, several
interleavings, ranks and launches, and faults planted into its PTX."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_kernels import load_extension, simulated_kernels
from moe_problems import GRADIENTS, PROBLEMS, RANK_PROBLEMS, Problem, check_results, edit, simulate
from simulator import Simulator
from torch import Tensor

from mok import functional
from mok.config import MoKConfig
from mok.testing import VirtualGroup

WITH_GRADS = {name: replace(problem, needs_grad=None) for name, problem in PROBLEMS.items()}
# Two experts of two or three blocks each, so that macrobatches of one block end inside experts.
LARGE = Problem(num_tokens=300, num_experts=2, hidden_size=136, intermediate_size=136, shared_size=72, needs_grad=None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROBLEMS)
def test_backward(name: str, seed: int) -> None:
    check_results(simulate(WITH_GRADS[name], seed), WITH_GRADS[name])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RANK_PROBLEMS)
def test_ranks_that_meet_inside_the_kernel(name: str, seed: int) -> None:
    check_results(simulate(WITH_GRADS[name], seed, device_barriers=True), WITH_GRADS[name])


@pytest.mark.parametrize("needed", range(len(GRADIENTS[:8])))
@pytest.mark.parametrize("is_alone", [True, False])
def test_only_what_is_wanted(needed: int, is_alone: bool) -> None:
    flags = tuple((i == needed) is is_alone for i in range(8))
    problem = replace(PROBLEMS["two ranks"], needs_grad=flags)
    check_results(simulate(problem, needed), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads(dtype: torch.dtype) -> None:
    problem = replace(LARGE, main_grads=dtype)
    check_results(simulate(problem, 0), problem)


def gradients(problem: Problem, seed: int = 0, **settings: float) -> list[list[Tensor | None]]:
    return [result.grads for result in simulate(problem, seed, **settings)]


def assert_same_bits(actual: list[list[Tensor | None]], expected: list[list[Tensor | None]]) -> None:
    for rank, (one, other) in enumerate(zip(actual, expected, strict=True)):
        for name, a, b in zip(GRADIENTS, one, other, strict=False):
            assert (a is None) is (b is None)
            assert a is None or b is None or torch.equal(a, b), f"{name} of rank {rank}"


def test_bits_do_not_depend_on_interleaving_and_sms() -> None:
    expected = gradients(LARGE, 0, num_sms=4)
    for seed, num_sms in [(1, 4), (2, 2), (3, 6)]:
        assert_same_bits(gradients(LARGE, seed, num_sms=num_sms), expected)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_macrobatches(dtype: torch.dtype | None) -> None:
    problem = replace(LARGE, main_grads=dtype)
    expected = gradients(problem)
    for size in (256, 300, 512):
        assert_same_bits(gradients(replace(problem, macrobatch_size=size), seed=size), expected)


@pytest.mark.parametrize("device_barriers", [False, True])
def test_macrobatches_of_two_ranks(device_barriers: bool) -> None:
    problem = replace(LARGE, num_ranks=2, num_tokens=150)
    expected = gradients(problem, device_barriers=device_barriers)
    assert_same_bits(gradients(replace(problem, macrobatch_size=256), 1, device_barriers=device_barriers), expected)


def test_macrobatches_of_one_expert_that_has_all() -> None:
    problem = replace(LARGE, num_experts=8, top_k=1, num_tokens=700, routing="all to one")
    results = simulate(problem, 0)
    check_results(results, problem)
    assert_same_bits(gradients(replace(problem, macrobatch_size=256), 1), [result.grads for result in results])


@pytest.mark.parametrize("macrobatch_size", [None, 256])
def test_recomputed_context(macrobatch_size: int | None) -> None:
    problem = replace(LARGE, macrobatch_size=macrobatch_size)
    assert_same_bits(gradients(replace(problem, recomputes=True)), gradients(problem))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bits_do_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    alone = Problem(num_tokens=128, num_experts=4, needs_grad=None)  # multiples of 16 give the same random numbers
    [expected] = gradients(alone)
    ranks = gradients(replace(alone, num_ranks=num_ranks, num_tokens=128 // num_ranks), 1)
    for index, name in enumerate(GRADIENTS[:5]):
        parts = [grads[index] for grads in ranks]
        assert all(part is not None for part in parts)
        assert torch.equal(torch.cat(parts), expected[index]), name


def test_experts_without_rows_get_zeros() -> None:
    problem = replace(PROBLEMS["one expert"], needs_grad=None)
    grads = dict(zip(GRADIENTS, gradients(problem)[0], strict=False))
    for name in ("d_routed_gate", "d_routed_up", "d_routed_down"):
        grad = grads[name]
        assert grad is not None
        assert not grad[:-1].any()
        assert grad[-1].any()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_backwards_in_any_order_and_twice(num_ranks: int) -> None:
    """Two forwards over one workspace, then their backwards in the same order, then the first again."""
    tokens, hidden, width, experts = 40, 128, 64, 4
    g = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) * 0.2).bfloat16()

    xs = [normal(num_ranks, tokens, hidden) for _ in range(2)]
    grad_outputs = [normal(num_ranks, tokens, hidden) for _ in range(2)]
    weights = normal(experts, width, hidden), normal(experts, width, hidden), normal(experts, hidden, width)
    ids = torch.rand(num_ranks, tokens, experts, generator=g).topk(2).indices
    router_weights = torch.rand(num_ranks, tokens, 2, generator=g)

    def rank(member: object) -> list[list[Tensor | None]]:
        config, r, local = MoKConfig(backend="cuda"), member.rank(), experts // num_ranks
        mine = [weight[r * local : (r + 1) * local] for weight in weights]
        workspace = functional.create_workspace(
            config, member if num_ranks > 1 else None, device="cpu", num_local_tokens=tokens, hidden_size=hidden, topk=2
        )
        schedule = functional.build_schedule(workspace, config, ids[r], num_local_experts=local)
        call = (config, workspace, schedule)
        contexts = [functional.forward(*call, x[r], router_weights[r], None, None, None, *mine)[1] for x in xs]

        def backward(i: int) -> list[Tensor | None]:
            return list(
                functional.backward(
                    *call, contexts[i], grad_outputs[i][r], xs[i][r], router_weights[r], None, None, None, *mine
                )
            )

        return [backward(i) for i in (0, 1, 0)]

    sim = Simulator(seed=1)
    with simulated_kernels(sim):
        results = VirtualGroup(num_ranks).run(rank)
    sim.raise_reports()
    for first, second, again in results:
        assert_same_bits([again], [first])
        assert first[0] is not None
        assert not torch.equal(first[0], second[0])


def test_main_grads_that_the_kernel_can_not_address() -> None:
    """Odd row strides: the kernel adds to a buffer of its own, which is then added."""
    tokens, hidden, width, experts = 40, 128, 64, 4
    g = torch.Generator().manual_seed(5)
    x, grad_output = (torch.randn(tokens, hidden, generator=g).bfloat16() for _ in range(2))
    gate, up = (torch.randn(experts, width, hidden, generator=g).bfloat16() * 0.1 for _ in range(2))
    down = torch.randn(experts, hidden, width, generator=g).bfloat16() * 0.1
    ids = torch.rand(tokens, experts, generator=g).topk(2).indices
    router_weights = torch.rand(tokens, 2, generator=g)
    results = {}
    for is_odd in (False, True):
        main_grads = [None, None, None]
        for weight in (gate, up, down):
            wide = torch.zeros(*weight.shape[:-1], weight.shape[-1] + is_odd)
            main_grads.append(wide[..., : weight.shape[-1]])
        sim = Simulator(seed=1)
        with simulated_kernels(sim):
            config = MoKConfig(backend="cuda")
            workspace = functional.create_workspace(
                config, None, device="cpu", num_local_tokens=tokens, hidden_size=hidden, topk=2
            )
            schedule = functional.build_schedule(workspace, config, ids, num_local_experts=experts)
            weights = (None, None, None, gate, up, down)
            call = (config, workspace, schedule)
            _, context = functional.forward(*call, x, router_weights, *weights)
            functional.backward(*call, context, grad_output, x, router_weights, *weights, main_grads=main_grads)
        sim.raise_reports()
        results[is_odd] = main_grads[3:]
    for odd, even in zip(results[True], results[False], strict=True):
        assert torch.equal(odd, even)
        assert even.any()


def without_acquire(text: str) -> str:
    return edit(r"fence\.acq_rel\.gpu;", "")(edit(r"ld\.acquire\.gpu\.global", "ld.relaxed.gpu.global")(text))


# name -> (edit, checks of which one must speak)
FAULTS = {
    "no proxy fence": (edit(r"fence\.proxy\.async\.global;", ""), {"proxy"}),
    "no acquire": (without_acquire, {"race"}),
    "no release": (edit(r"red\.release\.gpu\.global", "red.relaxed.gpu.global"), {"race"}),
    "counter never arrives": (edit(r"red\.release\.gpu\.global\.add\.u32 [^;]*;", ""), {"deadlock"}),
    "stage reused too early": (
        edit(r"wgmma\.wait_group\.sync\.aligned 1;", "wgmma.wait_group.sync.aligned 3;"),
        {"race"},
    ),
    "result read too early": (
        edit(r"wgmma\.wait_group\.sync\.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        {"wgmma"},
    ),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str, seed: int) -> None:
    change, kinds = FAULTS[name]
    load_extension()
    sim = Simulator(seed=seed)
    with simulated_kernels(sim), sim.edited_ptx("Backward", change), pytest.raises(RuntimeError):
        WITH_GRADS["several blocks and tiles"].run("cuda")
    assert kinds & {kind for kind, _ in sim.take_reports()}
