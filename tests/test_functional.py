"""One rank: the torch backend against the reference, and the reference against autograd."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from moe_cases import ARGUMENTS, GRADIENTS, Problem, make_problem, run_mok, run_reference

from mok import functional, reference
from mok.functional import MoKConfig
from mok.testing import VirtualGroup, assert_close_rel_l2, assert_same_bits

LIMITS = [None, 0.7]


def cruel_cases() -> dict[str, Problem]:
    return {
        "plain": make_problem(),
        "no shared expert": make_problem(shared_width=None),
        "no tokens": make_problem(num_tokens=0),
        "one token": make_problem(num_tokens=1),
        "topk 1": make_problem(topk=1),
        "one expert": make_problem(num_experts=1, top_experts=torch.zeros(29, 3, dtype=torch.int64)),
        "all on one expert": make_problem(top_experts=torch.full((29, 3), 5)),
        "all dropped": make_problem(top_experts=torch.full((29, 3), -1)),
        "int32 ids": make_problem(top_experts=torch.arange(87).view(29, 3).remainder(8).int()),
        "odd sizes": make_problem(hidden_size=7, width=5, shared_width=3),
    }


def assert_gradients_close(problem: Problem, actual, expected, tolerance: float) -> None:
    for name, got, want in zip(GRADIENTS, actual, expected, strict=True):
        assert_close_rel_l2(name, got, want, tolerance)
        if want is not None and want.dim() == 3:
            for expert in set(range(want.shape[0])) - set(problem.top_experts.flatten().tolist()):
                assert not got[expert].any(), f"{name}: expert {expert} has no rows, so its gradient must be zero"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("case", cruel_cases())
def test_matches_the_reference(case: str, limit: float | None):
    problem = cruel_cases()[case]
    problem.swiglu_limit = limit
    output, gradients = run_mok(problem)
    expected, expected_gradients = run_reference(problem)
    assert_close_rel_l2("output", output, expected, 1e-13)
    assert_gradients_close(problem, gradients, expected_gradients, 1e-13)


@pytest.mark.parametrize("limit", LIMITS)
def test_reference_formulas_match_autograd(limit: float | None):
    problem = make_problem(num_tokens=13, swiglu_limit=limit)
    gate, up, down = (weight.clone() for weight in problem.routed())
    wanted = [problem.x, problem.router_weights, gate, up, down, *problem.shared]
    for tensor in wanted:
        tensor.requires_grad_()
    schedule = reference.build_schedule([problem.top_experts], num_local_experts=8, num_local_tokens=13)[0]

    def mlp(x, gate, up, down):
        g, u = x @ gate.t(), x @ up.t()
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (torch.nn.functional.silu(g) * u) @ down.t()

    output = mlp(problem.x, *problem.shared)
    for token, experts in enumerate(problem.top_experts.tolist()):
        for k, expert in enumerate(experts):
            if expert >= 0:
                routed = mlp(problem.x[token], gate[expert], up[expert], down[expert])
                output = output.index_add(0, torch.tensor([token]), problem.router_weights[token, k] * routed[None])
    expected = torch.autograd.grad(output, wanted, problem.grad_output)
    tensors = (problem.x, problem.router_weights, *problem.shared, gate, up, down, limit)
    with torch.no_grad():
        actual, context = reference.forward(schedule, *tensors)
        gradients = reference.backward(schedule, context, problem.grad_output, *tensors)
    assert_close_rel_l2("output", actual, output.detach(), 1e-13)
    assert_gradients_close(problem, gradients, expected, 1e-13)


@pytest.mark.parametrize(("limit", "passes"), [(2.0, True), (1.999, False)])
def test_clamp_passes_its_gradient_on_the_edge_only(limit: float, passes: bool):
    """g = u = 2 exactly: at limit 2 the gradient passes, as in torch.clamp; just beyond it is exactly zero."""
    problem = make_problem(1, 1, 1, 1, 1, shared_width=None, top_experts=torch.zeros(1, 1, dtype=torch.int64))
    problem.swiglu_limit = limit
    problem.x.fill_(1)
    problem.router_weights.fill_(1)
    problem.gate_up.fill_(2)
    for _, gradients in (run_mok(problem), run_reference(problem)):
        assert bool(gradients.d_routed_gate.any()) is passes
        assert bool(gradients.d_routed_up.any()) is passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_plain_torch_in_the_same_dtype(dtype: torch.dtype):
    """The project's bound: at most 1.1 times the error of plain torch, both against float64 on the rounded inputs."""
    problem = make_problem(64, 64, 48, 8, 2, shared_width=32).to(dtype)
    output, gradients = run_mok(problem)
    expected, expected_gradients = run_reference(problem)
    plain = problem.to(dtype)
    leaves = [plain.x, plain.router_weights, plain.gate_up, plain.down, *plain.shared]
    for leaf in leaves:
        leaf.requires_grad_()

    def mlp(x, gate_up, down):
        gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, -1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)

    total = mlp(plain.x, torch.cat(plain.shared[:2]), plain.shared[2]).float()
    for expert in range(8):
        token, k = (plain.top_experts == expert).nonzero(as_tuple=True)
        routed = mlp(plain.x[token], plain.gate_up[expert], plain.down[expert])
        total = total.index_add(0, token, routed * plain.router_weights[token, k, None])
    total = total.to(dtype)
    d_x, d_weights, d_gate_up, d_down, *d_shared = torch.autograd.grad(total, leaves, plain.grad_output)
    plain_gradients = (d_x, d_weights, *d_gate_up.chunk(2, dim=1), d_down, *d_shared)

    def error(actual, exact):
        return ((actual.double() - exact).norm() / exact.norm()).item()

    assert error(output, expected) <= 1.1 * error(total.detach(), expected)
    for name, ours, theirs, exact in zip(GRADIENTS, gradients, plain_gradients, expected_gradients, strict=True):
        assert error(ours, exact) <= 1.1 * error(theirs, exact), name


def test_schedule_is_that_of_the_reference():
    problem = make_problem()
    config = MoKConfig()
    workspace = functional.create_workspace(config, None, device="cpu", num_local_tokens=40, hidden_size=24, topk=3)
    schedule = functional.build_schedule(workspace, config, problem.top_experts, num_local_experts=8)
    expected = reference.build_schedule([problem.top_experts], num_local_experts=8, num_local_tokens=40)[0]
    for field in dataclasses.fields(expected):
        assert_same_bits(field.name, getattr(schedule, field.name), getattr(expected, field.name))


def prepared(problem: Problem, **options):
    """config, workspace and schedule of a problem on one rank."""
    config = MoKConfig(backend="torch", **options)
    workspace = functional.create_workspace(
        config,
        None,
        device="cpu",
        num_local_tokens=64,
        hidden_size=problem.x.shape[1],
        topk=problem.top_experts.shape[1],
    )
    num_experts = problem.gate_up.shape[0]
    return (
        config,
        workspace,
        functional.build_schedule(workspace, config, problem.top_experts, num_local_experts=num_experts),
    )


def test_schedule_and_context_survive_flattening():
    """Callers keep the fields in save_for_backward and rebuild by keyword; every field must be a tensor."""
    problem = make_problem()
    config, workspace, schedule = prepared(problem)
    _, context = functional.forward(config, workspace, schedule, *problem.tensors())

    def rebuilt(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        assert all(isinstance(field, torch.Tensor) for field in fields.values())
        return type(value)(**fields)

    arguments = (problem.grad_output, *problem.tensors())
    expected = functional.backward(config, workspace, schedule, context, *arguments)
    actual = functional.backward(config, workspace, rebuilt(schedule), rebuilt(context), *arguments)
    for name, got, want in zip(GRADIENTS, actual, expected, strict=True):
        assert_same_bits(name, got, want)


@pytest.mark.parametrize("limit", LIMITS)
def test_recomputed_context_is_the_saved_one(limit: float | None):
    problem = make_problem(swiglu_limit=limit, dtype=torch.bfloat16)
    config, workspace, schedule = prepared(problem)
    _, saved = functional.forward(config, workspace, schedule, *problem.tensors())
    gate, up, _ = problem.routed()
    recomputed = functional.recompute_forward_context(
        config, workspace, schedule, problem.x, *problem.shared[:2], gate, up, limit
    )
    assert_same_bits("gate_up", recomputed.gate_up, saved.gate_up)
    assert_same_bits("shared_gate_up", recomputed.shared_gate_up, saved.shared_gate_up)
    exact = problem.to(torch.float64)
    schedule = reference.build_schedule([problem.top_experts], num_local_experts=8, num_local_tokens=29)[0]
    expected = reference.recompute_forward_context(schedule, exact.x, *exact.shared[:2], *exact.routed()[:2], limit)
    assert_close_rel_l2("gate_up", saved.gate_up, expected.gate_up, 4e-3)
    assert_close_rel_l2("shared_gate_up", saved.shared_gate_up, expected.shared_gate_up, 4e-3)


def test_without_saving_there_is_the_same_output_and_no_backward():
    problem = make_problem()
    config, workspace, schedule = prepared(problem)
    expected, _ = functional.forward(config, workspace, schedule, *problem.tensors())
    output, context = functional.forward(config, workspace, schedule, *problem.tensors(), save_for_backward=False)
    assert_same_bits("output", output, expected)
    assert context.gate_up.numel() == 0 and context.shared_gate_up.numel() == 0
    with pytest.raises(ValueError, match=r"context: expected a saved one, got an empty one"):
        functional.backward(config, workspace, schedule, context, problem.grad_output, *problem.tensors())


def test_forwards_share_a_workspace_and_backwards_come_in_any_order():
    problems = [make_problem(num_tokens, seed=num_tokens) for num_tokens in (29, 5, 64)]
    expected = [run_mok(problem)[1] for problem in problems]
    config, workspace, _ = prepared(problems[0])
    alive = []
    for problem in problems:
        schedule = functional.build_schedule(workspace, config, problem.top_experts, num_local_experts=8)
        alive.append((schedule, functional.forward(config, workspace, schedule, *problem.tensors())[1]))
    for index in (1, 2, 0):
        problem = problems[index]
        gradients = functional.backward(config, workspace, *alive[index], problem.grad_output, *problem.tensors())
        for name, got, want in zip(GRADIENTS, gradients, expected[index], strict=True):
            assert_same_bits(name, got, want)


def test_layout_of_the_weights_does_not_matter():
    """Halves of one parameter, separate tensors, padded rows and any expert stride."""
    problem = make_problem(dtype=torch.float32)
    gate, up, down = problem.routed()
    _, workspace, schedule = prepared(problem)
    config = workspace.config

    def padded(weight):
        room = torch.full((weight.shape[0], weight.shape[1] + 3, weight.shape[2] + 5), torch.nan)
        room[:, 1:-2, 2:-3] = weight
        return room[:, 1:-2, 2:-3]

    results = []
    for layout in (
        (gate, up, down),
        (gate.clone(), up.clone(), down.clone()),
        (padded(gate), padded(up), padded(down)),
    ):
        tensors = (problem.x, problem.router_weights, *problem.shared, *layout)
        output, context = functional.forward(config, workspace, schedule, *tensors)
        gradients = functional.backward(config, workspace, schedule, context, problem.grad_output, *tensors)
        results.append((output, *gradients))
    for other in results[1:]:
        for name, got, want in zip(("output", *GRADIENTS), other, results[0], strict=True):
            assert_close_rel_l2(name, got, want, 1e-6)


def test_inputs_may_be_strided():
    problem = make_problem(dtype=torch.float32)
    expected = run_mok(problem)
    problem.x = problem.x.t().contiguous().t()
    problem.grad_output = problem.grad_output.repeat_interleave(2, dim=1)[:, ::2]
    problem.router_weights = problem.router_weights.t().contiguous().t()
    actual = run_mok(problem)
    for name, got, want in zip(
        ("output", *GRADIENTS), (actual[0], *actual[1]), (expected[0], *expected[1]), strict=True
    ):
        assert_same_bits(name, got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_added_to(dtype: torch.dtype, main_dtype: torch.dtype):
    problem = make_problem(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    before = [
        torch.randn(weight.shape, generator=generator).to(main_dtype) for weight in (*problem.shared, *problem.routed())
    ]
    before[2] = None  # shared_down: returned
    main_grads = [None if buffer is None else buffer.clone() for buffer in before]
    _, gradients = run_mok(problem, main_grads=main_grads)
    exact = run_reference(problem)[1]
    tolerance = 5e-3 if torch.bfloat16 in (dtype, main_dtype) else 1e-6
    for index, name in enumerate(
        ("shared_gate", "shared_up", "shared_down", "routed_gate", "routed_up", "routed_down")
    ):
        returned, expected = getattr(gradients, f"d_{name}"), getattr(exact, f"d_{name}")
        if before[index] is None:
            assert_close_rel_l2(name, returned, expected, 1e-2)
        else:
            assert returned is None, name
            assert_close_rel_l2(name, main_grads[index], before[index].double() + expected, tolerance)
    assert_same_bits("expert without rows", main_grads[3][-1], before[3][-1])


@pytest.mark.parametrize("flag", range(8))
def test_gradients_not_needed_are_not_returned_and_the_others_do_not_change(flag: int):
    problem = make_problem(dtype=torch.float32)
    _, expected = run_mok(problem)
    for needs_grad in ([index == flag for index in range(8)], [index != flag for index in range(8)]):
        _, gradients = run_mok(problem, needs_grad=needs_grad)
        for name, needed, got, want in zip(GRADIENTS, needs_grad, gradients, expected, strict=True):
            if needed:
                assert_close_rel_l2(name, got, want, 1e-6)
            else:
                assert got is None, name


def test_dropped_route_does_not_see_another_tokens_infinity():
    problem = make_problem(dtype=torch.float32, shared_width=None)
    problem.x[0] = torch.inf
    problem.top_experts[0] = 0
    problem.top_experts[1] = -1
    output, gradients = run_mok(problem)
    assert not output[1].any() and not gradients.d_x[1].any() and not gradients.d_router_weights[1].any()


def test_runs_inside_autocast_and_with_parameters():
    problem = make_problem(dtype=torch.float32)
    expected, _ = run_mok(problem)
    problem.gate_up.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = run_mok(problem)
    assert not output.requires_grad
    assert_same_bits("output", output, expected)


def test_schedule_capacity():
    """Room for exactly the rows there are is enough; one less is an error that names the setting."""
    problem = make_problem(num_tokens=64, topk=2, top_experts=torch.zeros(64, 2, dtype=torch.int64))
    prepared(problem, schedule_capacity_multiplier=1.0)
    message = r"schedule_capacity_multiplier: expected at most 127 routed rows .* got 128 on rank 0"
    with pytest.raises(ValueError, match=message):
        prepared(problem, schedule_capacity_multiplier=127.5 / 128)


def test_workspaces_are_cached_by_their_arguments():
    functional.clear_workspace_cache()
    options = {"device": "cpu", "num_local_tokens": 4, "hidden_size": 8, "topk": 2}
    first = functional.get_workspace(MoKConfig(), None, **options)
    assert functional.get_workspace(MoKConfig(), None, **options) is first
    assert functional.get_workspace(MoKConfig(), None, **(options | {"topk": 1})) is not first
    assert functional.get_workspace(MoKConfig(timeout_s=1.0), None, **options) is not first
    assert functional.create_workspace(MoKConfig(), None, **options) is not first
    functional.clear_workspace_cache()
    assert functional.get_workspace(MoKConfig(), None, **options) is not first


def bad_arguments(problem: Problem) -> dict[str, tuple[str, object, type[Exception], str]]:
    gate, _, down = problem.routed()
    return {
        "x shape": ("x", problem.x[:, :-1], ValueError, r"x: .*\[29, 24\] on cpu, got torch.float32 \[29, 23\]"),
        "x tokens": ("x", problem.x[:-1], ValueError, r"x: expected .*\[29, 24\] on cpu, got torch.float32 \[28, 24\]"),
        "x dtype": ("x", problem.x.int(), ValueError, r"x: expected torch.float32 or .*, got torch.int32 \[29, 24\]"),
        "x device": ("x", problem.x.to("meta"), ValueError, r"x: expected .* on cpu, got .* on meta"),
        "x type": ("x", problem.x.tolist(), TypeError, r"x: expected a tensor, .*, got list"),
        "router_weights": ("router_weights", problem.router_weights.bfloat16(), ValueError,
                           r"router_weights: expected torch.float32 \[29, 3\] .* got torch.bfloat16 \[29, 3\]"),
        "gate dtype": ("routed_gate", gate.double(), ValueError, r"routed_gate: .* torch.float32 .* torch.float64"),
        "up width": ("routed_up", gate[:, :-1], ValueError, r"routed_up: .*\[8, 16, 24\] .* \[8, 15, 24\]"),
        "down experts": ("routed_down", down[:-1], ValueError, r"routed_down: .*\[8, 24, 16\] .* \[7, 24, 16\]"),
        "down strides": ("routed_down", down.mT.contiguous().mT, ValueError, r"routed_down: .* contiguous .* strides"),
        "shared alone": ("shared_up", None, TypeError, r"shared_up: expected a tensor, .* got NoneType"),
        "swiglu_limit": ("swiglu_limit", 0.0, ValueError, r"swiglu_limit: expected a positive number or None, got 0.0"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_arguments(make_problem(dtype=torch.float32)))
def test_bad_argument_is_named(case: str):
    problem = make_problem(dtype=torch.float32)
    config, workspace, schedule = prepared(problem)
    _, context = functional.forward(config, workspace, schedule, *problem.tensors())
    name, value, kind, message = bad_arguments(problem)[case]
    arguments = dict(zip(ARGUMENTS, problem.tensors(), strict=True)) | {name: value}
    with pytest.raises(kind, match=message):
        functional.forward(config, workspace, schedule, **arguments)
    with pytest.raises(kind, match=message):
        functional.backward(config, workspace, schedule, context, problem.grad_output, **arguments)


def test_bad_gradients_are_named():
    problem = make_problem(dtype=torch.float32)
    config, workspace, schedule = prepared(problem)
    _, context = functional.forward(config, workspace, schedule, *problem.tensors())

    def backward(grad_output=problem.grad_output, **options):
        functional.backward(config, workspace, schedule, context, grad_output, *problem.tensors(), **options)

    with pytest.raises(ValueError, match=r"grad_output: expected torch.float32 \[29, 24\] .* got torch.float64"):
        backward(problem.grad_output.double())
    with pytest.raises(ValueError, match=r"main_grads: expected 6 buffers or None each, got 2"):
        backward(main_grads=[None, None])
    with pytest.raises(ValueError, match=r"main_grads\[routed_down\]: expected .*\[8, 24, 16\] .* got .*\[8, 16, 24\]"):
        backward(main_grads=[None] * 5 + [torch.zeros(8, 16, 24)])
    with pytest.raises(ValueError, match=r"needs_grad: expected 8 flags, got 2"):
        backward(needs_grad=[True, False])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.full((29, 3), 8), r"top_experts: expected ids from -1 \(dropped\) to 7, got 8 to 8"),
        (torch.full((29, 3), -2), r"top_experts: expected ids from -1 \(dropped\) to 7, got -2 to -2"),
        (
            torch.zeros(29, 2).long(),
            r"top_experts: expected torch.int64 or torch.int32 \[T, 3\] on cpu, got .* \[29, 2\]",
        ),
        (torch.zeros(29, 3), r"top_experts: expected torch.int64 or torch.int32 .* got torch.float32"),
        (torch.zeros(65, 3).long(), r"top_experts: expected at most num_local_tokens = 64 tokens, got 65"),
    ],
)
def test_bad_expert_ids_are_named(ids: torch.Tensor, message: str):
    problem = make_problem()
    problem.top_experts = ids
    config = MoKConfig()
    workspace = functional.create_workspace(config, None, device="cpu", num_local_tokens=64, hidden_size=24, topk=3)
    with pytest.raises(ValueError, match=message):
        functional.build_schedule(workspace, config, ids, num_local_experts=8)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"hidden_size": 0}, ValueError, r"hidden_size: expected at least 1, got 0"),
        ({"topk": 2.0}, TypeError, r"topk: expected int, got float 2.0"),
        ({"num_local_tokens": -1}, ValueError, r"num_local_tokens: expected at least 0, got -1"),
        ({"group": "world"}, TypeError, r"group: expected a ProcessGroup, None or a VirtualGroup member, got str"),
        ({"config": None}, TypeError, r"config: expected MoKConfig, got NoneType"),
        ({"config": MoKConfig(backend="cuda")}, ValueError, r'backend: expected one that can serve cpu, got "cuda": '),
    ],
)
def test_bad_workspace_is_named(options: dict, kind: type[Exception], message: str):
    good = {"config": MoKConfig(), "group": None, "device": "cpu", "num_local_tokens": 4, "hidden_size": 8, "topk": 2}
    with pytest.raises(kind, match=message):
        functional.create_workspace(**(good | options))


def test_import_does_no_work():
    """No compiled module, no CUDA context, and `import mok` does not even import torch."""
    code = (
        "import sys, mok; assert 'torch' not in sys.modules;"
        "import torch, mok.functional; assert 'mok._C' not in sys.modules and not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "limit", "tolerance"),
    # Not bf16 with a limit: where g is rounded across it, the exact gradient is another one.
    [(torch.bfloat16, None, 1e-2), (torch.float32, None, 1e-5), (torch.float32, 0.7, 1e-5)],
)
@pytest.mark.parametrize("case", ["plain", "no shared expert", "no tokens", "all on one expert", "all dropped", "odd"])
def test_torch_backend_on_a_gpu(case: str, dtype: torch.dtype, limit: float | None, tolerance: float):
    """bf16 takes the grouped matmul unless sizes are odd; float32 goes expert by expert."""
    problem = (cruel_cases()[case] if case in cruel_cases() else make_problem(width=13)).to(dtype)
    problem.swiglu_limit = limit
    torch.full((1 << 22,), torch.nan, device="cuda")  # what the allocator hands out next is not zero
    output, gradients = run_mok(problem.cuda())
    expected, expected_gradients = run_reference(problem)
    assert_close_rel_l2("output", output.cpu(), expected, tolerance)
    on_cpu = [None if gradient is None else gradient.cpu() for gradient in gradients]
    assert_gradients_close(problem, on_cpu, expected_gradients, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_every_number_of_ranks_on_a_gpu(dtype: torch.dtype):
    problem = make_problem(104, 48, 32, 8, 3, shared_width=None, dtype=dtype).cuda()
    output, gradients = run_mok(problem)
    for size in (2, 4, 8):
        splits = [104 // size] * size
        ranks = VirtualGroup(size).run(
            lambda member, splits=splits: run_mok(problem.rank(member.rank(), splits), member, capacity=max(splits))
        )
        assert_same_bits("output", torch.cat([rank[0] for rank in ranks]), output)
        for name in GRADIENTS[:5]:
            parts = [getattr(rank[1], name) for rank in ranks]
            assert_same_bits(name, torch.cat(parts), getattr(gradients, name))


@pytest.mark.gpu
def test_torch_backend_on_a_gpu_adds_to_main_grads():
    problem = make_problem(dtype=torch.bfloat16).cuda()
    weights = (*problem.shared, *problem.routed())
    main_grads = [torch.ones(weight.shape, device="cuda") for weight in weights]
    run_mok(problem, main_grads=main_grads)
    _, (_, _, *routed, shared_gate, shared_up, shared_down) = run_mok(problem)
    for main_grad, gradient in zip(main_grads, (shared_gate, shared_up, shared_down, *routed), strict=True):
        assert_close_rel_l2("main gradient", main_grad, 1 + gradient.double(), 5e-3)
