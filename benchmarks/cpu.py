"""Forward plus backward of the experts on the CPU, beside transformers' implementations, in one run.

    python benchmarks/cpu.py [--tokens 2048 --hidden-size 512 --intermediate-size 256 --num-experts 32 --top-k 4]

Implementations take turns, so that a busy machine slows all of them; the table has medians and ratios of paired runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from mok import functional
from mok.testing import assert_close_rel_l2
from mok.torch_backend import join_gate_up

# "grouped_mm" is what transformers picks when nothing is asked for.
TRANSFORMERS_IMPLEMENTATIONS = ("grouped_mm", "eager")
Step = Callable[[], tuple[Tensor | None, ...]]


def transformers_step(name: str, args: argparse.Namespace, inputs: dict[str, Tensor]) -> Step:
    config = Qwen3MoeConfig(
        hidden_size=args.hidden_size,
        moe_intermediate_size=args.intermediate_size,
        num_experts=args.num_experts,
        num_experts_per_tok=args.top_k,
    )
    config._experts_implementation = name
    experts = Qwen3MoeExperts(config).to(inputs["x"].dtype)
    experts.gate_up_proj.data, experts.down_proj.data = inputs["gate_up_proj"], inputs["down_proj"]
    x, weights = inputs["x"].clone().requires_grad_(), inputs["router_weights"].clone().requires_grad_()
    wanted = [x, weights, experts.gate_up_proj, experts.down_proj]

    def step() -> tuple[Tensor | None, ...]:
        output = experts(x, inputs["top_experts"], weights)
        return output.detach(), *torch.autograd.grad(output, wanted, inputs["grad_output"])

    return step


def mok_step(args: argparse.Namespace, inputs: dict[str, Tensor]) -> Step:
    config = functional.MoKConfig(backend="torch")
    workspace = functional.get_workspace(
        config, None, device="cpu", num_local_tokens=args.tokens, hidden_size=args.hidden_size, topk=args.top_k
    )
    gate, up = inputs["gate_up_proj"].chunk(2, dim=1)

    def step() -> tuple[Tensor | None, ...]:
        schedule = functional.build_schedule(
            workspace, config, inputs["top_experts"], num_local_experts=args.num_experts
        )
        tensors = (inputs["x"], inputs["router_weights"], None, None, None, gate, up, inputs["down_proj"])
        output, context = functional.forward(config, workspace, schedule, *tensors)
        grads = functional.backward(config, workspace, schedule, context, inputs["grad_output"], *tensors)
        assert grads.d_routed_gate is not None and grads.d_routed_up is not None
        d_gate_up = join_gate_up(grads.d_routed_gate, grads.d_routed_up)  # the gradient of gate_up_proj, not a copy
        return output, grads.d_x, grads.d_router_weights, d_gate_up, grads.d_routed_down

    return step


def make_inputs(args: argparse.Namespace) -> dict[str, Tensor]:
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    scores = torch.randn(args.tokens, args.num_experts, generator=generator).softmax(-1)
    router_weights, top_experts = scores.topk(args.top_k)
    width, hidden = args.intermediate_size, args.hidden_size
    return {
        "x": normal(args.tokens, hidden),
        "grad_output": normal(args.tokens, hidden),
        "router_weights": router_weights / router_weights.sum(-1, keepdim=True),
        "top_experts": top_experts,
        "gate_up_proj": normal(args.num_experts, 2 * width, hidden, scale=hidden**-0.5),
        "down_proj": normal(args.num_experts, hidden, width, scale=width**-0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 2048), ("hidden-size", 512), ("intermediate-size", 256), ("num-experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    inputs = make_inputs(args)
    steps = {name: transformers_step(name, args, inputs) for name in TRANSFORMERS_IMPLEMENTATIONS}
    steps["mok"] = mok_step(args, inputs)

    expected, actual = steps["grouped_mm"](), steps["mok"]()
    for name, got, want in zip(("y", "dx", "dw", "dW_gate_up", "dW_down"), actual, expected, strict=True):
        assert_close_rel_l2(name, got, want, 1e-5 if args.dtype == "float32" else 2e-2)

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    flops = 18 * args.tokens * args.top_k * args.hidden_size * args.intermediate_size
    for name, times in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(seconds["mok"], times, strict=True))
        median = statistics.median(times)
        print(f"{name:12} {median * 1e3:7.1f} ms  {flops / median / 1e9:6.1f} GFLOP/s  mok takes {ratio:.2f} of it")


if __name__ == "__main__":
    main()
