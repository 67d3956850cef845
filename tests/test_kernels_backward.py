"""The backward kernel against autograd in float64, the torch backend and itself; on a GPU only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels import CRUEL, DEVICE, Case, dirty_memory, make_case, oracle
from torch import Tensor

from mok import functional as F
from mok.config import MoKConfig
from mok.testing import VirtualGroup, assert_same_bits, relative_l2

pytestmark = pytest.mark.gpu
__all__ = ["dirty_memory"]  # the fixture, for this file too

GRADIENTS = F.MoKGradients._fields


def gradients(
    case: Case,
    d_output: Tensor,
    backend: str = "cuda",
    group: object = None,
    *,
    num_sms: int | None = None,
    macrobatch_size: int | None = None,
    limit: float | None = None,
    capacity: int | None = None,
    recompute: bool = False,
    **options: object,
) -> F.MoKGradients:
    config = MoKConfig(backend=backend, num_sms=num_sms, macrobatch_size=macrobatch_size, timeout_s=10.0)
    tokens = case.x.shape[0] if capacity is None else capacity
    workspace = F.create_workspace(
        config, group, device=DEVICE, num_local_tokens=tokens, hidden_size=case.x.shape[1], topk=case.ids.shape[1]
    )
    schedule = F.build_schedule(workspace, config, case.ids, num_local_experts=case.down.shape[0])
    shared = case.shared or (None, None, None)
    weights = (*shared, case.gate, case.up, case.down)
    call = (config, workspace, schedule)
    if recompute:
        context = F.recompute_forward_context(*call, case.x, *shared[:2], case.gate, case.up, limit)
    else:
        _, context = F.forward(*call, case.x, case.weights, *weights, limit)
    result = F.backward(*call, context, d_output, case.x, case.weights, *weights, limit, **options)
    F.check(workspace)
    return result


def exact_gradients(case: Case, d_output: Tensor, limit: float | None = None) -> list[Tensor | None]:
    """By autograd through the formula of the layer in float64."""
    tensors = [case.x, case.weights, case.gate, case.up, case.down, *(case.shared or ())]
    x, weights, gate, up, down, *shared = (tensor.detach().double().requires_grad_() for tensor in tensors)
    leaves = [x, weights, gate, up, down, *shared]
    exact = Case(x, torch.cat([gate, up], dim=1), down, case.ids, weights, tuple(shared) or None)
    if case.x.shape[0]:
        oracle(exact, limit).backward(d_output.double())
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [*grads, *[None] * (8 - len(grads))]


def d_output_of(case: Case, seed: int = 1) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(case.x.shape, device=DEVICE, generator=generator).bfloat16()


def assert_right(case: Case, limit: float | None = None) -> None:
    d_output = d_output_of(case)
    actual = gradients(case, d_output, limit=limit)
    expected = gradients(case, d_output, "torch", limit=limit)
    for name, ours, theirs, exact in zip(
        GRADIENTS, actual, expected, exact_gradients(case, d_output, limit), strict=True
    ):
        assert (ours is None) == (exact is None), name
        if ours is None or theirs is None or exact is None or not exact.numel():
            continue
        assert not ours.isnan().any(), name
        if not exact.any():
            assert not ours.any(), name
            continue
        assert relative_l2(ours, exact) <= 1.1 * relative_l2(theirs, exact) + 1e-6, name


@pytest.mark.parametrize("name", CRUEL)
def test_gradients_are_as_exact_as_torch(name: str) -> None:
    *sizes, options = CRUEL[name]
    assert_right(make_case(*sizes, **options))


def test_negative_and_zero_router_weights_and_limit() -> None:
    case = make_case(500, 256, 128, 8, 2, shared=64)
    case.weights.sub_(0.2)
    case.weights[::3, 0] = 0
    assert_right(case)
    assert_right(case, limit=0.5)


def test_experts_without_tokens_get_zeros_on_dirty_memory() -> None:
    counts = [162, 0, 2577, 446, 0, 83]
    case = make_case(sum(counts), 2048, 768, len(counts), 1)
    case.ids = torch.repeat_interleave(torch.arange(6, device=DEVICE), torch.tensor(counts, device=DEVICE))[:, None]
    for step in range(3):
        grads = gradients(case, d_output_of(case, step))
        for name in GRADIENTS[2:5]:
            grad = getattr(grads, name)
            assert not grad[[1, 4]].any() and not grad.isnan().any(), name


def assert_all_same(actual: F.MoKGradients, expected: F.MoKGradients, why: str) -> None:
    for name, ours, theirs in zip(GRADIENTS, actual, expected, strict=True):
        if theirs is not None:
            assert_same_bits(f"{name}, {why}", ours, theirs)


def test_same_bits_on_every_run_any_number_of_sms_and_macrobatches() -> None:
    case = make_case(4000, 512, 384, 32, 4, shared=256, skew=1.0)
    d_output = d_output_of(case)
    expected = gradients(case, d_output)
    for num_sms in [None] * 19 + [2, 50, 130]:
        assert_all_same(gradients(case, d_output, num_sms=num_sms), expected, f"{num_sms} SMs")
    for size in (256, 1000, 4096):
        assert_all_same(gradients(case, d_output, macrobatch_size=size), expected, f"macrobatches of {size}")
    assert_all_same(gradients(case, d_output, recompute=True), expected, "recomputed")


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("everything_on", [None, 3])
def test_expert_parallel_gives_the_same_bits(size: int, everything_on: int | None) -> None:
    case = make_case(2048, 256, 128, 32, 4, drop=0.1)
    if everything_on is not None:
        case.ids.fill_(everything_on)
    d_output = d_output_of(case)
    expected = gradients(case, d_output)
    lengths = [2048 // size] * size
    lengths[0], lengths[-1] = lengths[0] + lengths[-1], 0  # one rank has none

    def rank(member: object) -> F.MoKGradients:
        r = member.rank()
        local = slice(sum(lengths[:r]), sum(lengths[: r + 1]))
        mine = slice(r * 32 // size, (r + 1) * 32 // size)
        part = Case(case.x[local], case.gate_up[mine], case.down[mine], case.ids[local], case.weights[local])
        return gradients(part, d_output[local], group=member, capacity=max(lengths))

    results = VirtualGroup(size).run(rank)
    for name in GRADIENTS[:5]:
        assert_same_bits(name, torch.cat([getattr(grads, name) for grads in results]), getattr(expected, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_in_one_buffer(dtype: torch.dtype) -> None:
    case = make_case(1000, 512, 200, 16, 4, skew=1.0)
    d_output = d_output_of(case)
    exact = exact_gradients(case, d_output)
    d_gate_up = torch.ones(case.gate_up.shape, dtype=dtype, device=DEVICE)
    d_down = torch.ones(case.down.shape, dtype=dtype, device=DEVICE)
    width = case.down.shape[2]
    main_grads = (None, None, None, d_gate_up[:, :width], d_gate_up[:, width:], d_down)
    grads = gradients(case, d_output, main_grads=main_grads)
    assert grads.d_routed_gate is None
    bound = 1e-2 if dtype == torch.bfloat16 else 6e-3
    for actual, wanted in zip(main_grads[3:], exact[2:5], strict=True):
        assert relative_l2(actual.double() - 1, wanted) < bound


@pytest.mark.parametrize("needed", range(5))
def test_only_what_is_wanted(needed: int) -> None:
    case = make_case(700, 256, 128, 8, 2, shared=64)
    d_output = d_output_of(case)
    expected = gradients(case, d_output)
    flags = [index == needed for index in range(8)]
    grads = gradients(case, d_output, needs_grad=flags)
    for index, name in enumerate(GRADIENTS):
        if index == needed:
            assert_same_bits(name, grads[index], expected[index])
        else:
            assert grads[index] is None


def test_nan_reaches_only_the_tokens_of_its_expert() -> None:
    case = make_case(700, 256, 128, 8, 2)
    d_output = d_output_of(case)
    clean = gradients(case, d_output)
    case = replace(case, down=case.down.clone())
    case.down[5].fill_(float("nan"))
    grads = gradients(case, d_output)
    hit = (case.ids == 5).any(-1)
    assert_same_bits("d_x of other tokens", grads.d_x[~hit], clean.d_x[~hit])
    others = [e for e in range(8) if e != 5]
    for name in GRADIENTS[2:5]:
        assert_same_bits(name, getattr(grads, name)[others], getattr(clean, name)[others])
