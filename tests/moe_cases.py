"""Problems for the tests of the functional layer: one global batch, cut over any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok import functional, reference
from mok.functional import MoKConfig, MoKGradients

GRADIENTS = MoKGradients._fields
# The arguments of forward from x on.
ARGUMENTS = (
    "x",
    "router_weights",
    "shared_gate",
    "shared_up",
    "shared_down",
    "routed_gate",
    "routed_up",
    "routed_down",
    "swiglu_limit",
)


@dataclass
class Problem:
    """Arguments and `grad_output`; routed weights as one Hugging Face parameter for gate and up."""

    top_experts: Tensor
    x: Tensor
    grad_output: Tensor
    router_weights: Tensor
    shared: tuple[Tensor | None, ...]
    gate_up: Tensor
    down: Tensor
    swiglu_limit: float | None = None

    def routed(self) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = self.gate_up.chunk(2, dim=1)
        return gate, up, self.down

    def tensors(self) -> tuple[Any, ...]:
        """In the order of ARGUMENTS."""
        return (self.x, self.router_weights, *self.shared, *self.routed(), self.swiglu_limit)

    def cuda(self) -> Problem:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.cuda()

        shared = tuple(move(weight) for weight in self.shared)
        rest = [move(t) for t in (self.top_experts, self.x, self.grad_output, self.router_weights)]
        return Problem(*rest, shared, move(self.gate_up), move(self.down), self.swiglu_limit)

    def to(self, dtype: torch.dtype) -> Problem:
        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(dtype)

        weights = self.router_weights.to(torch.promote_types(dtype, torch.float32))
        shared = tuple(cast(weight) for weight in self.shared)
        rest = (self.x, self.grad_output), (self.gate_up, self.down)
        (x, grad), (gate_up, down) = ([cast(t) for t in pair] for pair in rest)
        return Problem(self.top_experts, x, grad, weights, shared, gate_up, down, self.swiglu_limit)

    def rank(self, rank: int, splits: list[int]) -> Problem:
        """What this rank has of it; `splits` are the tokens of every rank."""
        tokens = slice(sum(splits[:rank]), sum(splits[: rank + 1]))
        experts = self.gate_up.shape[0] // len(splits)
        mine = slice(rank * experts, (rank + 1) * experts)
        return Problem(
            self.top_experts[tokens],
            self.x[tokens],
            self.grad_output[tokens],
            self.router_weights[tokens],
            self.shared,
            self.gate_up[mine],
            self.down[mine],
            self.swiglu_limit,
        )


def make_problem(
    num_tokens: int = 29,
    hidden_size: int = 24,
    width: int = 16,
    num_experts: int = 8,
    topk: int = 3,
    *,
    shared_width: int | None = 10,
    swiglu_limit: float | None = None,
    top_experts: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    """Random, with dropped routes, negative and zero router weights; the last expert gets no route."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if top_experts is None:
        top_experts = torch.randint(-1, num_experts - 1, (num_tokens, topk), generator=generator)
    router_weights = normal(num_tokens, topk)
    router_weights[::5, 0] = 0
    shared: tuple[Tensor | None, ...] = (None, None, None)
    if shared_width is not None:
        shared = (
            normal(shared_width, hidden_size),
            normal(shared_width, hidden_size),
            normal(hidden_size, shared_width),
        )
    return Problem(
        top_experts,
        normal(num_tokens, hidden_size),
        normal(num_tokens, hidden_size),
        router_weights,
        shared,
        normal(num_experts, 2 * width, hidden_size) * hidden_size**-0.5,
        normal(num_experts, hidden_size, width) * width**-0.5,
        swiglu_limit,
    ).to(dtype)


def run_mok(
    problem: Problem, group: Any = None, *, capacity: int | None = None, **backward_options: Any
) -> tuple[Tensor, MoKGradients]:
    """Output and gradients of the functional layer, on the problem's device."""
    num_tokens, hidden_size = problem.x.shape
    config = MoKConfig(backend="torch")
    workspace = functional.create_workspace(
        config,
        group,
        device=problem.x.device,
        num_local_tokens=num_tokens if capacity is None else capacity,
        hidden_size=hidden_size,
        topk=problem.top_experts.shape[1],
    )
    schedule = functional.build_schedule(
        workspace, config, problem.top_experts, num_local_experts=problem.gate_up.shape[0]
    )
    output, context = functional.forward(config, workspace, schedule, *problem.tensors())
    gradients = functional.backward(
        config, workspace, schedule, context, problem.grad_output, *problem.tensors(), **backward_options
    )
    return output, gradients


def run_reference(problem: Problem) -> tuple[Tensor, MoKGradients]:
    """The same in float64 by `mok.reference`."""
    problem = problem.to(torch.float64)
    schedule = reference.build_schedule(
        [problem.top_experts], num_local_experts=problem.gate_up.shape[0], num_local_tokens=problem.x.shape[0]
    )[0]
    output, context = reference.forward(schedule, *problem.tensors())
    return output, reference.backward(schedule, context, problem.grad_output, *problem.tensors())
