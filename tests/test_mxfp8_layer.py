"""MXFP8 routed weights through `mok.functional`, against the same computation written out, every operand rounded."""

import pytest
import torch
from torch import Tensor

import mok.functional as F
from mok import mxfp8, reference
from mok.testing import VirtualGroup, assert_close_rel_l2, assert_same_bits, relative_l2

CONFIG = F.MoKConfig(backend="torch")
NAMES = ["output", *F.MoKGradients._fields]


def fake_quantize(x: Tensor, dim: int) -> Tensor:
    """x [rows, cols] with each block of 32 along `dim` rounded to e4m3 times a power of two; in float64, from frexp."""
    rows = x.T if dim == 0 else x
    result = torch.empty_like(rows)
    for start in range(0, rows.shape[1], 32):
        block = rows[:, start : start + 32]
        ratio, exponent = torch.frexp(block.abs().amax(1, keepdim=True) / 448)  # ratio in [1/2, 1)
        scale = torch.ldexp(torch.ones_like(ratio), torch.where(ratio > 0.5, exponent, exponent - 1))
        scaled = block / scale
        _, top = torch.frexp(scaled)
        step = torch.ldexp(torch.ones_like(scaled), torch.clamp(top - 1, min=-6) - 3)
        result[:, start : start + 32] = torch.round(scaled / step) * step * scale
    return result.T if dim == 0 else result


def unchanged(x: Tensor, dim: int) -> Tensor:
    return x


class Problem:
    """Inputs of one layer, representable in bfloat16, so that all dtypes start from the same numbers.

    spread: standard deviation of the exponents that the numbers get on top.
    """

    def __init__(self, T=80, H=64, I=96, E=4, K=2, shared=32, seed=0, spread=0.0):  # noqa: E741
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, std=1.0):
            factor = torch.exp2(spread * torch.randn(*shape, generator=generator)) * std
            return (torch.randn(*shape, generator=generator) * factor).bfloat16().double()

        self.x, self.dy = draw(T, H), draw(T, H)
        self.ids = torch.rand(T, E, generator=generator).topk(K).indices
        self.ids[self.ids == E - 1] = -1  # the last expert has no rows
        self.ids[0] = -1  # and the first token no expert
        self.router_weights = torch.rand(T, K, generator=generator) - 0.2
        self.routed = [draw(E, I, H, std=H**-0.5), draw(E, I, H, std=H**-0.5), draw(E, H, I, std=I**-0.5)]
        self.shared = [None] * 3
        if shared:
            self.shared = [
                draw(shared, H, std=H**-0.5),
                draw(shared, H, std=H**-0.5),
                draw(H, shared, std=shared**-0.5),
            ]

    def run(self, dtype, *, group=None, tokens=slice(None), experts=slice(None), limit=None):
        """Forward and backward through `mok.functional`; output and gradients by name."""
        x, dy = self.x[tokens].to(dtype), self.dy[tokens].to(dtype)
        ids = self.ids[tokens]
        router_weights = self.router_weights[tokens].to(torch.promote_types(dtype, torch.float32))
        weights = mxfp8.quantize_weights(*(weight[experts].to(dtype) for weight in self.routed))
        shared = [None if weight is None else weight.to(dtype) for weight in self.shared]
        sizes = {"num_local_tokens": self.x.shape[0], "hidden_size": x.shape[1], "topk": ids.shape[1]}
        workspace = F.create_workspace(CONFIG, group, device="cpu", **sizes)
        num_local_experts = len(range(*experts.indices(len(self.routed[0]))))
        schedule = F.build_schedule(workspace, CONFIG, ids, num_local_experts=num_local_experts)
        output, context = F.forward(CONFIG, workspace, schedule, x, router_weights, *shared, *weights, limit)
        grads = F.backward(CONFIG, workspace, schedule, context, dy, x, router_weights, *shared, *weights, limit)
        return {"output": output, **grads._asdict()}

    def written_out(self, quantize, limit=None):
        """The layer in float64, expert by expert, each operand of each routed matmul passed through `quantize`."""
        x, dy, router_weights = self.x, self.dy, self.router_weights.double()
        output, d_x, d_router_weights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(router_weights)
        d_routed = [torch.zeros_like(weight) for weight in self.routed]
        for expert, (gate, up, down) in enumerate(zip(*self.routed, strict=True)):
            token, k = (self.ids == expert).nonzero().T
            if len(token) == 0:
                continue
            rows, dy_rows, weight = x[token], dy[token], router_weights[token, k][:, None]
            g = (quantize(rows, 1) @ quantize(gate, 1).T).requires_grad_()
            u = (quantize(rows, 1) @ quantize(up, 1).T).requires_grad_()
            activation = swiglu(g, u, limit)
            a = activation.detach()
            output.index_add_(0, token, weight * (quantize(a, 1) @ quantize(down, 1).T))

            p = quantize(dy_rows, 1) @ quantize(down, 0)
            d_router_weights[token, k] = (p * a).sum(1)
            dg, du = torch.autograd.grad(activation, (g, u), weight * p)
            d_routed[0][expert] = quantize(dg, 0).T @ quantize(rows, 0)
            d_routed[1][expert] = quantize(du, 0).T @ quantize(rows, 0)
            d_routed[2][expert] = quantize(dy_rows, 0).T @ quantize(weight * a, 0)
            d_x.index_add_(0, token, quantize(dg, 1) @ quantize(gate, 0) + quantize(du, 1) @ quantize(up, 0))
        d_shared = [None] * 3
        if self.shared[0] is not None:
            leaves = [tensor.clone().requires_grad_() for tensor in (x, *self.shared)]
            result = swiglu(leaves[0] @ leaves[1].T, leaves[0] @ leaves[2].T, limit) @ leaves[3].T
            d_shared_x, *d_shared = torch.autograd.grad(result, leaves, dy)
            output, d_x = output + result.detach(), d_x + d_shared_x
        return dict(zip(NAMES, [output, d_x, d_router_weights, *d_routed, *d_shared], strict=True))


def swiglu(g: Tensor, u: Tensor, limit: float | None) -> Tensor:
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return torch.nn.functional.silu(g) * u


@pytest.mark.parametrize("shared, limit", [(32, None), (0, 0.7)])
def test_each_matmul_is_quantised_where_it_should_be(shared, limit):
    """In float64 nothing else rounds, so that output and gradients are those of the written-out computation.

    The numbers spread over many powers of two, so that blocks along the wrong dimension would round them differently.
    """
    problem = Problem(shared=shared, spread=4.0)
    got, want = problem.run(torch.float64, limit=limit), problem.written_out(fake_quantize, limit)
    for name in NAMES:
        assert_close_rel_l2(name, got[name], want[name], 1e-12)
    exact = problem.written_out(unchanged, limit)
    for name in ("output", "d_x", "d_router_weights", "d_routed_gate", "d_routed_up", "d_routed_down"):
        assert relative_l2(want[name], exact[name]) > 1e-4, f"{name} does not show whether anything was quantised"


def test_the_reference_quantises_likewise():
    problem = Problem(T=40, spread=4.0)
    _, _, x, router_weights, shared, weights, dy = call_arguments(problem, torch.float64)
    (schedule,) = reference.build_schedule([problem.ids], num_local_experts=4, num_local_tokens=40)
    rest = (x, router_weights.double(), *shared, *weights)
    output, context = reference.forward(schedule, *rest)
    got = {"output": output, **reference.backward(schedule, context, dy, *rest)._asdict()}
    want = problem.written_out(fake_quantize)
    for name in NAMES:
        assert_close_rel_l2(name, got[name], want[name], 1e-12)


def test_the_shared_expert_is_not_quantised():
    problem = Problem()
    problem.ids[:] = -1
    got, want = problem.run(torch.float64), problem.written_out(unchanged)
    for name in NAMES:
        assert_close_rel_l2(name, got[name], want[name], 1e-13)


# Relative L2 error against float64 of the unquantised layer, at the shape of `test_error_levels`: in docs/numerics.md.
LEVELS = {
    "output": 0.066,
    "d_x": 0.068,
    "d_router_weights": 0.066,
    "d_routed_gate": 0.069,
    "d_routed_up": 0.066,
    "d_routed_down": 0.066,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_error_levels(dtype):
    """The error is the format's own: within 1 % of the written-out computation's, and what the documentation says."""
    problem = Problem(T=512, H=256, I=128, E=8, K=2, shared=0)
    got, exact, fake = problem.run(dtype), problem.written_out(unchanged), problem.written_out(fake_quantize)
    for name, level in LEVELS.items():
        error, fake_error = relative_l2(got[name], exact[name]), relative_l2(fake[name], exact[name])
        assert abs(error / fake_error - 1) < 0.01, f"{name}: {error:.4f}, written out {fake_error:.4f}"
        assert abs(fake_error / level - 1) < 0.05, f"{name}: {fake_error:.4f}, documented {level:.3f}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_bits_at_every_expert_parallel_size(ranks):
    problem = Problem(T=64, shared=0)
    whole = problem.run(torch.bfloat16)
    tokens = [slice(64 // ranks * rank, 64 // ranks * (rank + 1)) for rank in range(ranks)]
    experts = [slice(4 // ranks * rank, 4 // ranks * (rank + 1)) for rank in range(ranks)]
    parts = VirtualGroup(ranks).run(
        lambda member: problem.run(
            torch.bfloat16, group=member, tokens=tokens[member.rank()], experts=experts[member.rank()]
        )
    )
    for name in NAMES[:6]:
        assert_same_bits(name, torch.cat([part[name] for part in parts]), whole[name])


def call_arguments(problem, dtype=torch.bfloat16):
    """Workspace, schedule, x, router weights, shared weights, quantised weights and dy."""
    sizes = {"num_local_tokens": problem.x.shape[0], "hidden_size": problem.x.shape[1], "topk": problem.ids.shape[1]}
    workspace = F.create_workspace(CONFIG, None, device="cpu", **sizes)
    schedule = F.build_schedule(workspace, CONFIG, problem.ids, num_local_experts=len(problem.routed[0]))
    shared = [None if weight is None else weight.to(dtype) for weight in problem.shared]
    quantized = mxfp8.quantize_weights(*(weight.to(dtype) for weight in problem.routed))
    return workspace, schedule, problem.x.to(dtype), problem.router_weights, shared, quantized, problem.dy.to(dtype)


def test_one_form_where_one_is_enough():
    """Forward and recompute with (data, scales); backward with only the transposed form of routed_down."""
    problem = Problem()
    workspace, schedule, x, router_weights, shared, (gate, up, down), dy = call_arguments(problem)
    want = problem.run(torch.bfloat16)
    normal = gate[:2], up[:2], down[:2]
    output, context = F.forward(CONFIG, workspace, schedule, x, router_weights, *shared, *normal)
    again = F.recompute_forward_context(CONFIG, workspace, schedule, x, *shared[:2], *normal[:2])
    assert_same_bits("output", output, want["output"])
    assert_same_bits("gate_up", again.gate_up, context.gate_up)
    grads = F.backward(CONFIG, workspace, schedule, again, dy, x, router_weights, *shared, gate, up, down[2:])
    for name, grad in grads._asdict().items():
        assert_same_bits(name, grad, want[name])


def test_main_grads_accumulate_in_float32():
    problem = Problem(shared=0)
    workspace, schedule, x, router_weights, shared, (gate, up, down), dy = call_arguments(problem)
    _, context = F.forward(CONFIG, workspace, schedule, x, router_weights, *shared, gate, up, down)
    main_grads = [None] * 3 + [torch.full(weight.shape, 1.0) for weight in problem.routed]
    for _ in range(2):
        F.backward(
            CONFIG, workspace, schedule, context, dy, x, router_weights, *shared, gate, up, down[2:], None, main_grads
        )
    want = problem.written_out(fake_quantize)
    for name, main_grad in zip(NAMES[3:6], main_grads[3:], strict=True):
        assert_close_rel_l2(name, (main_grad - 1) / 2, want[name], 0.02)
        assert (main_grad[-1] == 1).all(), "an expert without rows adds nothing"


def test_a_gradient_that_overflowed_stays_visible():
    problem = Problem(shared=0)
    problem.dy[5, 3] = float("inf")
    grads = problem.run(torch.bfloat16)
    for name in ("d_x", "d_router_weights", "d_routed_gate", "d_routed_up", "d_routed_down"):
        assert not grads[name].isfinite().all(), name


def bad_calls():
    problem = Problem()
    _, _, _, _, _, (gate, up, down), _ = call_arguments(problem)
    bf16_down = problem.routed[2].bfloat16()
    return {
        "routed_down: expected an MXFP8 tuple, as routed_gate is, got torch.bfloat16": (
            "forward",
            (gate, up, bf16_down),
        ),
        r"routed_up: expected \(data, scales\) or .* got a tuple of 3": ("forward", (gate, up[:3], down)),
        r"routed_gate data: expected torch.float8_e4m3fn \[4, I, 64\].* got torch.uint8": (
            "forward",
            ((gate[0].view(torch.uint8), *gate[1:]), up, down),
        ),
        r"routed_gate data scales: expected torch.uint8 \[4, 1, 1, 32, 16\]": (
            "forward",
            ((gate[0], gate[1][:, :, 0]), up, down),
        ),
        r"routed_up data_t: expected torch.float8_e4m3fn \[4, 64, 96\].* got .* \[4, 96, 64\]": (
            "forward",
            (gate, (*up[:2], *up[:2]), down),
        ),
        r"routed_up: expected \(data, scales, data_t, scales_t\) in backward, got a tuple of 2": (
            "backward",
            (gate, up[2:], down),
        ),
        r"routed_down data_t: expected torch.float8_e4m3fn \[4, 96, 64\].* got .* \[4, 64, 96\]": (
            "backward",
            (gate, up, down[:2]),
        ),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_errors_name_expected_and_actual(message):
    call, weights = bad_calls()[message]
    workspace, schedule, x, router_weights, shared, quantized, dy = call_arguments(Problem())
    _, context = F.forward(CONFIG, workspace, schedule, x, router_weights, *shared, *quantized)
    with pytest.raises(ValueError, match=message):
        if call == "forward":
            F.forward(CONFIG, workspace, schedule, x, router_weights, *shared, *weights)
        else:
            F.backward(CONFIG, workspace, schedule, context, dy, x, router_weights, *shared, *weights)


def test_sizes_and_dtypes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"routed_gate: expected multiples of 32 for MXFP8, got \[4, 48, 64\]"):
        Problem(I=48).run(torch.bfloat16)
    with pytest.raises(ValueError, match=r"x: expected torch.bfloat16, .* with MXFP8 weights, got torch.float16"):
        Problem().run(torch.float16)
