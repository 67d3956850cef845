"""LoRA on experts: what it computes, what it does not compute, and what people do to modules that have it."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks
from moe_cases import GRADIENTS, Problem, make_problem
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mok.hf
from mok import functional, mxfp8, reference
from mok.functional import LoraFactors, MoKConfig, MoKGradients, MoKWorkspace
from mok.nn import MoKLayer, _op, add_lora, merge_lora, remove_lora
from mok.testing import VirtualGroup, assert_close_rel_l2, assert_same_bits, relative_l2

H, I, E, K = 16, 8, 8, 2  # noqa: E741
BOTH = ("gate_up_proj", "down_proj")


def make_layer(**options: Any) -> MoKLayer:
    torch.manual_seed(0)
    return MoKLayer(H, I, E, K, **options)


def randomise_lora(layer: nn.Module, seed: int = 1) -> None:
    """B, too, which starts out zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)


def adapted(r: int = 4, lora_alpha: float = 8, *, lora: dict[str, Any] | None = None, **options: Any) -> MoKLayer:
    layer = make_layer(**options)
    add_lora(layer, r, lora_alpha, **(lora or {}))
    randomise_lora(layer)
    return layer


def call(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Output and gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}


# The functions, against the reference


def random_lora(problem: Problem, targets: tuple[str, ...] = BOTH, lora_ranks: tuple[int, int] = (3, 5)) -> LoraFactors:
    generator = torch.Generator().manual_seed(3)

    def factors(weight: Tensor, r: int) -> tuple[Tensor, Tensor]:
        shapes = (weight.shape[0], r, weight.shape[2]), (weight.shape[0], weight.shape[1], r)
        first, second = (torch.randn(shape, generator=generator).to(weight.dtype) / 4 for shape in shapes)
        return first, second

    nothing = (None, None)
    return LoraFactors(
        *(factors(problem.gate_up, lora_ranks[0]) if "gate_up_proj" in targets else nothing),
        *(factors(problem.down, lora_ranks[1]) if "down_proj" in targets else nothing),
    )


def prepare(problem: Problem, group: Any = None) -> tuple[MoKConfig, MoKWorkspace, Any]:
    config = MoKConfig(backend="torch")
    num_tokens, hidden_size = problem.x.shape
    topk = problem.top_experts.shape[1]
    workspace = functional.create_workspace(
        config, group, device=problem.x.device, num_local_tokens=num_tokens, hidden_size=hidden_size, topk=topk
    )
    num_local_experts = len(problem.down)
    schedule = functional.build_schedule(workspace, config, problem.top_experts, num_local_experts=num_local_experts)
    return config, workspace, schedule


def run(problem: Problem, lora: LoraFactors, **options: Any) -> tuple[Tensor, MoKGradients]:
    start = prepare(problem)
    output, context = functional.forward(*start, *problem.tensors(), lora=lora)
    again = functional.recompute_forward_context(
        *start, problem.x, *problem.shared[:2], *problem.routed()[:2], problem.swiglu_limit, lora=lora
    )
    num_rows = int(start[2].expert_offsets[-1])  # on a GPU there is room for dropped routes behind them
    assert_same_bits("context", again.gate_up[:num_rows], context.gate_up[:num_rows])
    options = {"lora": lora, **options}
    return output, functional.backward(*start, context, problem.grad_output, *problem.tensors(), **options)


@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:], ()], ids=str)
@pytest.mark.parametrize("options", [{}, {"swiglu_limit": 0.5}, {"shared_width": None}], ids=str)
def test_against_explicit_weights(targets, options):
    problem = make_problem(**options)
    lora = random_lora(problem, targets)
    expected, expected_grads, expected_lora_grads = exact(problem, lora)
    lora_grads = LoraFactors(*[None if factor is None else torch.ones_like(factor) for factor in lora])
    output, gradients = run(problem, lora, lora_grads=lora_grads)
    assert_close_rel_l2("output", output, expected, 1e-12)
    for name in GRADIENTS:  # those of W are those of W + B A
        assert_close_rel_l2(name, getattr(gradients, name), getattr(expected_grads, name), 1e-12)
    for name, gradient in expected_lora_grads._asdict().items():
        added_to = getattr(lora_grads, name)
        assert_close_rel_l2(name, None if added_to is None else added_to - 1, gradient, 1e-12)


def exact(problem: Problem, lora: LoraFactors) -> tuple[Tensor, MoKGradients, LoraFactors]:
    """Output, gradients and those of the factors by `mok.reference`, with `W + B A` in float64."""
    problem = problem.to(torch.float64)
    lora = LoraFactors(*[None if factor is None else factor.double() for factor in lora])
    explicit = reference.with_lora(lora, *problem.routed())
    arguments = (problem.x, problem.router_weights, *problem.shared, *explicit, problem.swiglu_limit)
    num_experts, num_tokens = len(problem.down), len(problem.x)
    schedules = reference.build_schedule(
        [problem.top_experts], num_local_experts=num_experts, num_local_tokens=num_tokens
    )
    output, context = reference.forward(schedules[0], *arguments)
    gradients = reference.backward(schedules[0], context, problem.grad_output, *arguments)
    return output, gradients, reference.lora_gradients(lora, gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("lora_ranks", [(8, 16), (3, 8)])
def test_on_a_gpu(lora_ranks):
    """The grouped matmul takes ranks that are multiples of 8; with others it goes expert by expert."""
    problem = make_problem(dtype=torch.bfloat16)
    lora = random_lora(problem, lora_ranks=lora_ranks)
    expected = exact(problem, lora)
    torch.full((1 << 22,), torch.nan, device="cuda")  # what the allocator hands out next is not zero
    lora = LoraFactors(*[factor.cuda() for factor in lora])
    lora_grads = LoraFactors(*map(torch.zeros_like, lora))
    output, gradients = run(problem.cuda(), lora, lora_grads=lora_grads)
    assert_close_rel_l2("output", output.cpu(), expected[0], 1e-2)
    for name in GRADIENTS:
        assert_close_rel_l2(name, getattr(gradients, name).cpu(), getattr(expected[1], name), 1e-2)
    for name, gradient in lora_grads._asdict().items():
        assert_close_rel_l2(name, gradient.cpu(), getattr(expected[2], name), 1e-2)


def test_bfloat16_is_as_exact_as_the_merged_weights():
    problem = make_problem(num_tokens=100, hidden_size=64, width=32, dtype=torch.bfloat16, shared_width=None)
    lora = random_lora(problem, lora_ranks=(8, 8))
    expected = exact(problem, lora)
    lora_grads = LoraFactors(*map(torch.zeros_like, lora))
    results = [(*run(problem, lora, lora_grads=lora_grads), lora_grads)]
    merged_weights = reference.with_lora(lora, *problem.routed())
    problem.routed = lambda: merged_weights
    output, gradients = run(problem, LoraFactors())
    results.append((output, gradients, reference.lora_gradients(lora, gradients)))
    for name in ("d_x", "d_router_weights", *LoraFactors._fields):
        part = 2 if name in LoraFactors._fields else 1
        error, merged = (relative_l2(getattr(r[part], name), getattr(expected[part], name)) for r in results)
        assert error < 1.1 * merged, name
    assert relative_l2(results[0][0], expected[0]) < 1.1 * relative_l2(results[1][0], expected[0])


def test_gate_and_up_apart_in_memory():
    problem = make_problem()
    lora = random_lora(problem)
    together = run(problem, lora)
    problem.routed = lambda: tuple(w.clone() for w in (*problem.gate_up.chunk(2, dim=1), problem.down))
    apart = run(problem, lora)
    assert_close_rel_l2("output", apart[0], together[0], 1e-12)
    for name in GRADIENTS:
        assert_close_rel_l2(name, getattr(apart[1], name), getattr(together[1], name), 1e-12)


@pytest.mark.parametrize("wanted", range(4), ids=lambda index: LoraFactors._fields[index])
def test_one_gradient_alone(wanted):
    problem = make_problem()
    lora = random_lora(problem)
    everything = LoraFactors(*map(torch.zeros_like, lora))
    run(problem, lora, lora_grads=everything)
    alone = LoraFactors(*[torch.zeros_like(factor) if i == wanted else None for i, factor in enumerate(lora)])
    _, gradients = run(problem, lora, lora_grads=alone, needs_grad=[False] * 8)
    assert all(gradient is None for gradient in gradients)
    assert_same_bits(LoraFactors._fields[wanted], alone[wanted], everything[wanted])


def test_bad_arguments_are_named():
    problem = make_problem()
    lora = random_lora(problem)
    config, workspace, schedule = prepare(problem)

    def forward(lora: Any, problem: Problem = problem, workspace: MoKWorkspace = workspace, **weights: Any) -> None:
        arguments = dict(zip(("gate", "up", "down"), problem.routed(), strict=True)) | weights
        start = (config, workspace, schedule, problem.x, problem.router_weights, None, None, None)
        functional.forward(*start, *arguments.values(), lora=lora)

    with pytest.raises(ValueError, match=r"lora.gate_up_A: expected torch.float64 \[8, r, 24\].* \[8, 3, 23\]"):
        forward(lora._replace(gate_up_A=lora.gate_up_A[..., 1:]))
    with pytest.raises(ValueError, match=r"lora.gate_up_B: expected torch.float64 \[8, 32, 3\].* \[8, 32, 2\]"):
        forward(lora._replace(gate_up_B=lora.gate_up_B[..., 1:]))
    with pytest.raises(ValueError, match=r"lora.down_B: expected torch.float64 .* got torch.float32"):
        forward(lora._replace(down_B=lora.down_B.float()))
    with pytest.raises(TypeError, match=r"lora.down_B: expected a tensor, .* got NoneType"):
        forward(lora._replace(down_B=None))
    with pytest.raises(TypeError, match="lora: expected LoraFactors or None, got tuple"):
        forward(tuple(lora))
    with pytest.raises(ValueError, match=r"lora.down_A: expected the last dimension contiguous"):
        forward(lora._replace(down_A=lora.down_A.mT.contiguous().mT))
    kernels = SimpleNamespace(__name__="mok.cuda_backend")
    with pytest.raises(ValueError, match=r'lora: expected None with backend "cuda" \(only "torch" computes adapters\)'):
        forward(lora, workspace=dataclasses.replace(workspace, backend=kernels))
    with pytest.raises(ValueError, match="lora: expected None with MXFP8 weights"):
        routed = (torch.randn(8, 128, 128, dtype=torch.float64) for _ in range(3))
        quantised = dict(zip(("gate", "up", "down"), mxfp8.quantize_weights(*routed), strict=True))
        wide = make_problem(hidden_size=128, width=128)
        config, workspace, schedule = prepare(wide)
        forward(random_lora(wide), wide, workspace, **quantised)
    with pytest.raises(ValueError, match=r"lora_grads.down_A: expected None where lora has None, got torch.float64"):
        run(problem, random_lora(problem, BOTH[:1]), lora_grads=LoraFactors(down_A=lora.down_A))
    with pytest.raises(ValueError, match=r"lora_grads.down_A: expected torch.float64 \[8, 5, 16\].* \[8, 16, 5\]"):
        run(problem, lora, lora_grads=LoraFactors(down_A=lora.down_A.mT))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ((BOTH[:1], BOTH), "rank 0: gate_up r=3; rank 1: gate_up r=3, down r=5"),
        ((None, BOTH[:1]), "rank 0: none; rank 1: gate_up r=3"),
    ],
)
def test_ranks_must_have_the_same_adapters(targets, message):
    problem = make_problem(num_tokens=6)

    def call(member: Any) -> None:
        part, mine = problem.rank(member.rank(), [3, 3]), targets[member.rank()]
        lora = None if mine is None else random_lora(part, mine)
        functional.forward(*prepare(part, member), *part.tensors(), lora=lora)

    with pytest.raises(ValueError, match=f"lora: expected the same on every rank, got {message}"):
        VirtualGroup(2).run(call)


# The layer


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True},
        {"target_parameters": ["gate_up_proj"]},
        {"target_parameters": "down_proj"},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"shared_intermediate_size": 4, "swiglu_limit": 0.2}], ids=str)
def test_layer_against_explicit_weights(lora, options):
    layer = adapted(4, 6, lora=lora, dtype=torch.float64, **options)
    plain = make_layer(dtype=torch.float64, **options)
    x = torch.randn(3, 5, H, dtype=torch.float64)
    results = call(layer, x)
    weights = dict(plain.named_parameters())
    for target, adapter in layer.experts.lora.items():
        scaling = 6 / 2 if lora.get("use_rslora") else 6 / 4
        assert adapter.lora_A.shape[1] == 4
        product = torch.einsum("eor,eri->eoi", adapter.lora_B, adapter.lora_A)
        weights[f"experts.{target}"] = layer.experts.get_parameter(target) + scaling * product
    x.requires_grad_()
    layer.zero_grad()
    y = torch.func.functional_call(plain, weights, (x,))
    y.float().square().sum().backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters() if "lora_" in name}
    expected |= {name: parameter.grad for name, parameter in plain.named_parameters() if "experts." not in name}
    for name, gradient in (expected | {"y": y.detach(), "x": x.grad}).items():
        assert_close_rel_l2(name, results[name], gradient, 1e-12)
    assert results["experts.gate_up_proj"] is None and results["experts.down_proj"] is None


def test_nothing_changes_at_first():
    layer = make_layer()
    x = torch.randn(5, H)
    before = layer(x)
    rng = torch.get_rng_state()
    parameters = add_lora(layer, 4, 8)
    assert torch.equal(layer(x), before)
    assert [id(p) for p in parameters] == [id(p) for name, p in layer.named_parameters() if "lora_" in name]
    assert all(parameter.requires_grad for parameter in (*parameters, layer.router.weight))
    assert not layer.experts.gate_up_proj.requires_grad and not layer.experts.down_proj.requires_grad
    first = [parameter.clone() for parameter in parameters]
    assert (first[1] == 0).all() and (first[3] == 0).all()
    for factor, fan_in in ((first[0], H), (first[2], I)):
        assert factor.abs().max() <= fan_in**-0.5 and factor.std() > 0.4 * fan_in**-0.5
        assert not torch.equal(factor[0], factor[1])
    remove_lora(layer)
    torch.set_rng_state(rng)
    assert all(torch.equal(a, b) for a, b in zip(first, add_lora(layer, 4, 8), strict=True))


@pytest.mark.parametrize("frozen", ["router", "x", "lora_A", "lora_B", "gate_up_proj.lora", "all but one"])
def test_only_gradients_that_are_needed(frozen):
    layer = adapted(dtype=torch.float64)
    x = torch.randn(5, H, dtype=torch.float64)
    expected = call(layer, x)
    for name, parameter in layer.named_parameters():
        if "lora_" in name or "router" in name:
            one = "experts.lora.down_proj.lora_A"
            parameter.requires_grad_(name == one if frozen == "all but one" else frozen not in name)
    x.requires_grad_(frozen not in ("x", "all but one"))
    layer.zero_grad()
    layer(x).float().square().sum().backward()
    for name, gradient in [("x", x.grad)] + [(name, p.grad) for name, p in layer.named_parameters()]:
        needed = x.requires_grad if name == "x" else layer.get_parameter(name).requires_grad
        assert_close_rel_l2(name, gradient, expected[name] if needed else None, 1e-14)


def test_base_weights_may_be_trained_too():
    layer = adapted(dtype=torch.float64)
    layer.experts.requires_grad_()
    merged = copy.deepcopy(layer)
    merge_lora(merged)
    x = torch.randn(9, H, dtype=torch.float64)
    results, expected = call(layer, x), call(merged.requires_grad_(), x)
    for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight", "x", "y"):
        assert_close_rel_l2(name, results[name], expected[name], 1e-12)


class Watch(TorchDispatchMode):
    """The largest new tensor that any operation makes, inside mok's operators, too."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside: dict[Any, Callable[..., Any]] = {
            torch.ops.mok.moe.default: _op._moe._init_fn,
            torch.ops.mok.moe_backward.default: _op._moe_backward._init_fn,
        }
        if func in inside:
            with self:
                return inside[func](*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return results


@pytest.mark.parametrize("is_frozen", [True, False])
def test_no_tensor_of_the_size_of_a_weight(is_frozen):
    torch.manual_seed(0)
    layer = MoKLayer(64, 32, 16, 2)
    add_lora(layer, 2)
    layer.experts.gate_up_proj.requires_grad_(not is_frozen)
    x = torch.randn(8, 64, requires_grad=True)
    with Watch(list(layer.parameters())) as watch:
        layer(x).square().sum().backward()
    assert (layer.experts.gate_up_proj.grad is None) == is_frozen
    smallest_weight = layer.experts.down_proj.numel()
    assert watch.largest > 16 * 64  # it has seen the gradients of the factors
    assert (watch.largest < smallest_weight / 4) if is_frozen else (watch.largest == 2 * smallest_weight)


def test_config_of_a_layer_with_adapters(monkeypatch):
    """The torch backend is asked for by name, so no device can make it another; and only while there are adapters."""
    asked = []
    get_workspace = functional.get_workspace

    def spy(config, *arguments, **options):
        asked.append(config.backend)
        return get_workspace(config, *arguments, **options)

    monkeypatch.setattr(functional, "get_workspace", spy)
    layer = adapted(config=MoKConfig(num_sms=3))
    layer(torch.randn(5, H)).sum().backward()
    assert asked == ["torch", "torch"] and "backend=torch" in repr(layer)
    merge_lora(layer)
    layer(torch.randn(5, H))
    assert asked[2:] == [None] and "backend=torch" not in repr(layer)


# Expert parallelism


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_parallel_gives_the_bits_of_one_rank(size, dtype):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layer = make_layer(dtype=dtype)
    torch.manual_seed(2)
    add_lora(layer, 4, 8)
    group, shards = VirtualGroup(size), []
    for rank in range(size):
        shard = make_layer(dtype=dtype, process_group=group.member(rank))
        torch.manual_seed(2)
        assert [len(parameter) for parameter in add_lora(shard, 4, 8)] == [E // size] * 4
        shards.append(shard)
    randomise = {name: parameter for name, parameter in layer.named_parameters() if "lora_" in name}
    for name, parameter in randomise.items():
        if name.endswith("lora_A"):
            parts = [shard.get_parameter(name) for shard in shards]
            assert_same_bits(name, torch.cat(parts).detach(), parameter.detach())
    randomise_lora(layer)
    with torch.no_grad():
        for name, parameter in randomise.items():
            for shard, part in zip(shards, parameter.chunk(size), strict=True):
                shard.get_parameter(name).copy_(part)
    x = torch.randn(41, H, dtype=dtype)
    expected = call(layer, x)
    sizes = [40 // size] * (size - 1)
    xs = x.split([*sizes, 41 - sum(sizes)])
    results = group.run(lambda member: call(shards[member.rank()], xs[member.rank()]))
    torch.set_num_threads(threads)
    for name in ("y", "x", *randomise):
        assert_same_bits(name, torch.cat([result[name] for result in results]), expected[name])
    assert all(result["experts.down_proj"] is None for result in results)


# Survival


def test_state_dict_round_trip():
    layer, other = adapted(), make_layer()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    add_lora(other, 4, 8)
    x = torch.randn(5, H)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(layer(x), other(x))
    assert [name for name in layer.state_dict() if "lora" in name] == [
        "experts.lora.gate_up_proj.lora_A",
        "experts.lora.gate_up_proj.lora_B",
        "experts.lora.down_proj.lora_A",
        "experts.lora.down_proj.lora_B",
    ]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies(duplicate):
    layer = adapted()
    x = torch.randn(5, H)
    layer(x).sum().backward()
    other = duplicate(layer)
    assert torch.equal(layer(x), other(x))
    remove_lora(other)
    assert layer.experts.lora is not None and not torch.equal(layer(x), other(x))


def test_dtypes():
    layer = adapted(dtype=torch.bfloat16)
    assert {p.dtype for name, p in layer.named_parameters() if "lora_" in name} == {torch.float32}
    x = torch.randn(64, H).bfloat16()
    results, exact = call(layer, x), call(copy.deepcopy(layer).double(), x.double())
    for name, tensor in exact.items():
        assert_close_rel_l2(name, results[name], tensor, 8 * torch.finfo(torch.bfloat16).eps)
        assert name == "y" or results[name] is None or "lora_" not in name or results[name].dtype == torch.float32
    half = adapted(dtype=torch.float16, lora={"dtype": torch.float16})
    assert {parameter.dtype for parameter in half.experts.parameters()} == {torch.float16}
    moved = adapted().to(torch.bfloat16)
    assert {parameter.dtype for parameter in moved.experts.parameters()} == {torch.bfloat16}
    assert moved(x).dtype == torch.bfloat16


def test_autocast():
    layer = adapted()
    x = torch.randn(64, H)
    with torch.autocast("cpu", torch.bfloat16):
        y, routed = layer(x, return_router_output=True)
    y.float().sum().backward()
    lower = copy.deepcopy(layer.experts).bfloat16()
    for target, lora in lower.lora.items():  # the scaling is applied before the rounding
        lora.lora_B = nn.Parameter(layer.experts.lora[target].lora_B.detach())
    assert torch.equal(y, lower(x.bfloat16(), routed.top_experts, routed.router_weights))
    assert all(p.grad.dtype == torch.float32 for name, p in layer.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    layer = adapted()
    x = torch.randn(9, H)
    expected = call(layer, x)

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(layer, x, use_reentrant=use_reentrant)

    layer.zero_grad()
    results = call(Checkpointed(), x) | {name: parameter.grad for name, parameter in layer.named_parameters()}
    for name, tensor in expected.items():
        assert (tensor is None and results[name] is None) or torch.equal(results[name], tensor), name


def test_no_grad_and_no_tokens():
    layer = adapted()
    x = torch.randn(5, H)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            silent = layer(x)
        assert torch.equal(silent, layer(x)) and silent.grad_fn is None
    nothing = call(layer, x[:0])
    assert all(tensor is None or (tensor == 0).all() for tensor in nothing.values())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend):
    layer = adapted()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for num_tokens in (5, 9):
        x = torch.randn(num_tokens, H)
        expected = call(layer, x)
        for name, tensor in call(compiled, x).items():
            assert_close_rel_l2(name, tensor, expected[name.removeprefix("_orig_mod.")], 1e-6)


def test_op_is_a_good_citizen():
    experts = adapted(lora={"target_parameters": "down_proj"}).experts
    x, ids = torch.randn(5, H, requires_grad=True), torch.randint(-1, E, (5, K))
    arguments = (x, ids, torch.rand(5, K, requires_grad=True), experts.gate_up_proj, experts.down_proj)
    factors = experts.lora["down_proj"].parameters()
    torch.library.opcheck(
        torch.ops.mok.moe.default,
        (*arguments, None, None, None, None, experts._seat_with_lora.number, True, None, None, *factors),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_meta_device():
    with torch.device("meta"):
        layer = make_layer()
        add_lora(layer)
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    for lora in layer.experts.lora.values():
        lora.reset_parameters()
        assert lora.lora_A.std() > 0 and (lora.lora_B == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merge_and_remove(dtype):
    layer = adapted(dtype=dtype)
    plain, x = make_layer(dtype=dtype), torch.randn(9, H, dtype=dtype)
    other = copy.deepcopy(layer)
    y = layer(x)
    merge_lora(layer)
    assert_close_rel_l2("y", layer(x), y, 8 * torch.finfo(dtype).eps)
    assert layer.state_dict().keys() == plain.state_dict().keys() and repr(layer) == repr(plain)
    remove_lora(other)
    assert torch.equal(other(x), plain(x))
    assert not layer.experts.down_proj.requires_grad
    add_lora(layer)  # and again


def test_targets_of_different_rank():
    layer = make_layer(dtype=torch.float64)
    add_lora(layer, 2, 4, target_parameters=["down_proj"])
    add_lora(layer, 8, 3, target_parameters=["gate_up_proj"])
    randomise_lora(layer)
    x = torch.randn(9, H, dtype=torch.float64)
    y = layer(x)
    merge_lora(layer)
    assert_close_rel_l2("y", layer(x), y, 1e-12)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "r: expected at least 1, got 0", {"r": 0}),
        (TypeError, "r: expected int, got float 2.0", {"r": 2.0}),
        (TypeError, "lora_alpha: expected a number, got str '8'", {"lora_alpha": "8"}),
        (ValueError, r"target_parameters: expected some of .*, got \['up_proj'\]", {"target_parameters": ["up_proj"]}),
        (ValueError, r"target_parameters: expected some of .*, got \[\]", {"target_parameters": []}),
        (ValueError, "target_parameters: expected some of .*, got 'q_proj'", {"target_parameters": "q_proj"}),
    ],
)
def test_bad_options_are_named(error, message, options):
    layer = make_layer()
    with pytest.raises(error, match=message):
        add_lora(layer, **options)
    assert layer.experts.lora is None and layer.experts.down_proj.requires_grad


def test_bad_modules_are_named():
    with pytest.raises(ValueError, match="module: expected MoKExperts in it, got none in Linear"):
        add_lora(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="module: expected experts with adapters in it, got none in MoKLayer"):
        merge_lora(make_layer())
    with pytest.raises(ValueError, match="module: expected experts with adapters in it, got none in MoKLayer"):
        remove_lora(make_layer())
    both = nn.ModuleList([make_layer(), adapted(lora={"target_parameters": ["down_proj"]})])
    with pytest.raises(ValueError, match=r"module: expected no adapters of down_proj in 1.experts, got some"):
        add_lora(both)
    assert both[0].experts.lora is None
    kernels = make_layer(config=MoKConfig(backend="cuda"))
    with pytest.raises(
        ValueError, match='module: expected backend "torch" or None in the config of experts, got "cuda"'
    ):
        add_lora(kernels)


# In several processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("gloo"))
    yield ranks
    ranks.stop()


def batches() -> list[Tensor]:
    return list(torch.randn(24, H, generator=torch.Generator().manual_seed(1)).chunk(2))


def data_parallel(rank: int, folder: Path) -> dict[str, Tensor | None]:
    layer = adapted()
    call(DistributedDataParallel(layer), batches()[rank])
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def expert_parallel(rank: int, folder: Path) -> dict[str, Tensor | None]:
    layer, whole = make_layer(process_group=dist.group.WORLD), adapted()
    add_lora(layer, 4, 8)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.copy_(whole.get_parameter(name).chunk(2)[rank])
    return call(layer, batches()[rank])


def fully_sharded(rank: int, folder: Path) -> dict[str, Tensor | None]:
    layer = adapted()
    fully_shard(layer.experts)
    fully_shard(layer)
    results = call(layer, batches()[rank])
    mok.hf.save_lora(layer, folder / "sharded")
    with pytest.raises(ValueError, match="expected whole weights to merge in experts"):
        merge_lora(layer)
    remove_lora(layer)
    with pytest.raises(ValueError, match="module: expected whole weights in experts, got sharded ones"):
        add_lora(layer)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in results.items()}


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded, expert_parallel])
def test_several_processes(ranks, wrap, tmp_path):
    layer = adapted()
    expected = call(layer, torch.cat(batches()))
    results = ranks.run(wrap, tmp_path)
    names = [name for name in expected if "lora_" in name]
    for name in names:
        if wrap is expert_parallel:
            assert_close_rel_l2(name, torch.cat([result[name] for result in results]), expected[name], 1e-6)
        else:
            for result in results:
                assert_close_rel_l2(name, 2 * result[name], expected[name], 1e-5)  # both take the mean
    assert len(names) == 4 and all(result["experts.down_proj"] is None for result in results)
    if wrap is fully_sharded:
        mok.hf.save_lora(layer, tmp_path / "whole")
        files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sharded", "whole")]
        assert files[0].keys() == files[1].keys()
        for key, tensor in files[0].items():
            assert_same_bits(key, tensor, files[1][key])
