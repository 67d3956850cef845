"""Small MoE problems that run in the simulator and on the torch backend, and the comparison of the two."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from moe_kernels import simulated_kernels
from simulator import Simulator
from torch import Tensor

from mok import functional
from mok.config import MoKConfig
from mok.testing import VirtualGroup, relative_l2


class Result(NamedTuple):
    schedule: Any
    output: Tensor
    context: Any
    grads: list[Tensor | None]  # of backward, then main_grads


@dataclass(frozen=True)
class Problem:
    num_ranks: int = 1
    num_tokens: int = 40
    hidden_size: int = 128
    intermediate_size: int = 64
    num_experts: int = 4
    top_k: int = 2
    shared_size: int = 0
    routing: str = "random"
    swiglu_limit: float | None = None
    is_uneven: bool = False  # the last rank has no tokens, the others in between
    capacity_multiplier: float | None = None  # default: room for any routing
    macrobatch_size: int | None = None
    needs_grad: tuple[bool, ...] | None = (False,) * 8  # None: all
    main_grads: torch.dtype | None = None
    recomputes: bool = False

    def tokens_of(self, rank: int) -> int:
        return (
            self.num_tokens * (self.num_ranks - 1 - rank) // (self.num_ranks - 1) if self.is_uneven else self.num_tokens
        )

    def top_experts(self, rank: int, generator: torch.Generator) -> Tensor:
        shape = (self.tokens_of(rank), self.top_k)
        scores = torch.rand(shape[0], self.num_experts, generator=generator)
        ids = scores.topk(self.top_k).indices
        if self.routing == "dropped":
            ids[torch.rand(shape, generator=generator) < 0.3] = -1
        if self.routing == "all dropped":
            ids[:] = -1
        if self.routing == "all to one":
            ids = torch.full(shape, self.num_experts - 1)
        if self.routing == "one expert":
            ids = torch.full(shape, -1)
            ids[:, 0] = self.num_experts - 1
        return ids

    def run(self, backend: str) -> list[Result]:
        """The results of every rank."""
        g = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=g) * 0.2).bfloat16()

        e, h, i, s = self.num_experts, self.hidden_size, self.intermediate_size, self.shared_size
        ranks = range(self.num_ranks)
        x = [normal(self.tokens_of(r), h) * 5 for r in ranks]
        gate_up, down = normal(e, 2 * i, h), normal(e, h, i)
        shared = (normal(s, h), normal(s, h), normal(h, s)) if s else (None, None, None)
        ids = [self.top_experts(r, g) for r in ranks]
        weights = [torch.randn(self.tokens_of(r), self.top_k, generator=g) for r in ranks]
        multiplier = self.capacity_multiplier or float(self.num_ranks)
        config = MoKConfig(
            backend=backend, schedule_capacity_multiplier=multiplier, macrobatch_size=self.macrobatch_size
        )
        grad_outputs = [normal(self.tokens_of(r), h) * 5 for r in ranks]

        def rank(member: object) -> Result:
            r, local = member.rank(), e // self.num_ranks
            mine = slice(r * local, (r + 1) * local)
            workspace = functional.create_workspace(
                config,
                member if self.num_ranks > 1 else None,
                device=torch.device("cpu"),
                num_local_tokens=self.num_tokens,
                hidden_size=h,
                topk=self.top_k,
            )
            schedule = functional.build_schedule(workspace, config, ids[r], num_local_experts=local)
            routed = gate_up[mine, :i], gate_up[mine, i:], down[mine]
            output, context = functional.forward(
                config, workspace, schedule, x[r], weights[r], *shared, *routed, self.swiglu_limit
            )
            everything = *shared, *routed
            main_grads = None
            if self.main_grads is not None:
                starts = [None if w is None else w.to(self.main_grads, copy=True) for w in everything]
                main_grads = [start if start is None else start.contiguous() for start in starts]
            grads: list[Tensor | None] = []
            if self.needs_grad is None or any(self.needs_grad):
                if self.recomputes:
                    context = functional.recompute_forward_context(
                        config, workspace, schedule, x[r], *shared[:2], *routed[:2], self.swiglu_limit
                    )
                grads = [
                    *functional.backward(
                        config,
                        workspace,
                        schedule,
                        context,
                        grad_outputs[r],
                        x[r],
                        weights[r],
                        *everything,
                        self.swiglu_limit,
                        main_grads,
                        needs_grad=self.needs_grad,
                    ),
                    *(main_grads or ()),
                ]
            if backend == "cuda":
                importlib.import_module("mok.cuda_backend").check(workspace)
            return Result(schedule, output, context, grads)

        return VirtualGroup(self.num_ranks).run(rank)


def simulate(problem: Problem, seed: int, *, device_barriers: bool = False, **settings: float) -> list[Result]:
    sim = Simulator(seed=seed, num_ranks=problem.num_ranks if device_barriers else 1, **settings)
    with simulated_kernels(sim, device_barriers=device_barriers):
        result = problem.run("cuda")
    sim.raise_reports()
    return result


PROBLEMS = {
    "small": Problem(),
    "odd sizes": Problem(num_tokens=77, hidden_size=200, intermediate_size=72, num_experts=5, top_k=3),
    "several blocks and tiles": Problem(num_tokens=300, hidden_size=320, intermediate_size=136, shared_size=72),
    "one expert": Problem(num_tokens=150, routing="one expert"),
    "dropped": Problem(routing="dropped", swiglu_limit=0.5),
    "all dropped": Problem(routing="all dropped", shared_size=64),
    "one token": Problem(num_tokens=1, num_experts=8, top_k=8),
    "more blocks than the ring has": Problem(num_tokens=50, hidden_size=64, num_experts=40, top_k=32),
    "two ranks": Problem(num_ranks=2, num_tokens=50, shared_size=64, routing="dropped"),
    "two ranks, one expert": Problem(num_ranks=2, num_tokens=90, routing="one expert"),
    "two ranks, the other has no tokens": Problem(num_ranks=2, num_tokens=70, is_uneven=True, shared_size=64),
    "four uneven ranks": Problem(num_ranks=4, num_tokens=60, num_experts=4, is_uneven=True),
    "no tokens": Problem(num_tokens=0),
    "two ranks, no tokens": Problem(num_ranks=2, num_tokens=0),
    "four ranks": Problem(num_ranks=4, num_tokens=30, num_experts=8, top_k=3),
}

RANK_PROBLEMS = [name for name, problem in PROBLEMS.items() if problem.num_ranks > 1]


def check_results(results: list[Result], problem: Problem) -> None:
    for simulated, expected in zip(results, problem.run("torch"), strict=True):
        num_rows = int(expected[0].expert_offsets[-1])
        assert torch.equal(simulated[0].row_route[:num_rows], expected[0].row_route)
        for field in ("expert_offsets", "route_row", "route_rank"):
            assert torch.equal(getattr(simulated[0], field), getattr(expected[0], field)), field
        assert relative_l2(simulated[1], expected[1]) < 2e-3
        for field in ("gate_up", "shared_gate_up"):
            actual, wanted = getattr(simulated[2], field), getattr(expected[2], field)
            kept = min(len(actual), len(wanted))  # gate and up of more rows are computed again in backward
            assert kept or not len(wanted)
            assert relative_l2(actual[:kept], wanted[:kept]) < 2e-3, field
        for name, actual, wanted in zip(GRADIENTS, simulated.grads, expected.grads, strict=False):
            assert (actual is None) == (wanted is None), name
            if wanted is not None:
                assert relative_l2(actual, wanted) < 5e-3, name


GRADIENTS = [
    "d_x",
    "d_router_weights",
    "d_routed_gate",
    "d_routed_up",
    "d_routed_down",
    "d_shared_gate",
    "d_shared_up",
    "d_shared_down",
    "main_shared_gate",
    "main_shared_up",
    "main_shared_down",
    "main_routed_gate",
    "main_routed_up",
    "main_routed_down",
]


def edit(pattern: str, replacement: str, only: int | None = None) -> Callable[[str], str]:
    """A PTX edit: every match, or the one of that number."""

    def apply(text: str) -> str:
        matches = list(re.finditer(pattern, text))
        assert matches, f"the kernels no longer contain {pattern}"
        for match in reversed(matches if only is None else [matches[only]]):
            text = text[: match.start()] + match.expand(replacement) + text[match.end() :]
        return text

    return apply
