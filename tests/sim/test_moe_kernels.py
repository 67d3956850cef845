"""The project's schedule and forward kernels, in the simulator, against the torch backend: several
interleavings, 1, 2 and 4 ranks, cruel routings. And faults planted into their PTX, each of which must be found."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from moe_kernels import load_extension, simulated_kernels
from simulator import Simulator
from torch import Tensor

from mok import functional
from mok.config import MoKConfig
from mok.testing import VirtualGroup, relative_l2


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

    def run(self, backend: str) -> list[tuple[object, Tensor, object]]:
        """(schedule, output, context) of every rank."""
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
        config = MoKConfig(backend=backend, schedule_capacity_multiplier=multiplier)

        def rank(member: object) -> tuple[object, Tensor, object]:
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
            if backend == "cuda":
                importlib.import_module("mok.cuda_backend").check(workspace)
            return schedule, output, context

        return VirtualGroup(self.num_ranks).run(rank)


def simulate(
    problem: Problem, seed: int, *, device_barriers: bool = False, **settings: float
) -> list[tuple[object, Tensor, object]]:
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
    "two ranks": Problem(num_ranks=2, num_tokens=50, shared_size=64, routing="dropped"),
    "two ranks, one expert": Problem(num_ranks=2, num_tokens=90, routing="one expert"),
    "two ranks, the other has no tokens": Problem(num_ranks=2, num_tokens=70, is_uneven=True, shared_size=64),
    "four uneven ranks": Problem(num_ranks=4, num_tokens=60, num_experts=4, is_uneven=True),
    "no tokens": Problem(num_tokens=0),
    "two ranks, no tokens": Problem(num_ranks=2, num_tokens=0),
    "four ranks": Problem(num_ranks=4, num_tokens=30, num_experts=8, top_k=3),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PROBLEMS)
def test_forward(name: str, seed: int) -> None:
    check_results(simulate(PROBLEMS[name], seed), PROBLEMS[name])


RANK_PROBLEMS = [name for name, problem in PROBLEMS.items() if problem.num_ranks > 1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RANK_PROBLEMS)
def test_ranks_that_meet_inside_the_kernel(name: str, seed: int) -> None:
    check_results(simulate(PROBLEMS[name], seed, device_barriers=True), PROBLEMS[name])


def check_results(results: list[tuple[object, Tensor, object]], problem: Problem) -> None:
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


@pytest.mark.parametrize("seed", [0, 1])
def test_schedule_overflow_is_an_error(seed: int) -> None:
    problem = replace(PROBLEMS["two ranks, one expert"], capacity_multiplier=1.0)
    with pytest.raises(ValueError, match="schedule_capacity_multiplier: expected at most 180 routed rows"):
        simulate(replace(problem, top_k=2, routing="all to one"), seed)


def test_forward_does_not_depend_on_the_interleaving() -> None:
    problem = PROBLEMS["several blocks and tiles"]
    results = [simulate(problem, seed, num_sms=num_sms)[0] for seed, num_sms in [(0, 4), (1, 4), (2, 2), (3, 6)]]
    for other in results[1:]:
        assert torch.equal(other[1], results[0][1])
        assert torch.equal(other[2].gate_up, results[0][2].gate_up)


def edit(pattern: str, replacement: str, only: int | None = None) -> Callable[[str], str]:
    """A PTX edit: every match, or the one of that number."""

    def apply(text: str) -> str:
        matches = list(re.finditer(pattern, text))
        assert matches, f"the kernels no longer contain {pattern}"
        for match in reversed(matches if only is None else [matches[only]]):
            text = text[: match.start()] + match.expand(replacement) + text[match.end() :]
        return text

    return apply


INIT = r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (%r\d+);"


def count_off_by(sign: str) -> Callable[[str], str]:
    """Change the arrival count of the second barrier that is initialised, which counts the consumers of a stage."""
    return edit(INIT, rf"{{ .reg .b32 c; {sign}.u32 c, \2, 1; mbarrier.init.shared::cta.b64 [\1], c; }}", only=1)


def without_acquire(text: str) -> str:
    """Readiness counters are read relaxed, and no fence follows."""
    return edit(r"fence\.acq_rel\.gpu;", "")(edit(r"ld\.acquire\.gpu\.global", "ld.relaxed.gpu.global")(text))


# name -> (edit, checks of which one must speak, what the reports must name)
FAULTS = {
    "no proxy fence": (edit(r"fence\.proxy\.async\.global;", ""), {"proxy"}, r"cp\.async\.bulk\.tensor"),
    "no mbarrier_init fence": (edit(r"fence\.mbarrier_init\.release\.cluster;", ""), {"proxy"}, "fence.mbarrier_init"),
    "count too low": (count_off_by("sub"), {"race", "barrier"}, "copies of mbarrier|arrivals"),
    "count too high": (count_off_by("add"), {"deadlock"}, r"mbarrier shared\+\d+: awaited parity"),
    "stage reused too early": (
        edit(r"wgmma\.wait_group\.sync\.aligned 1;", "wgmma.wait_group.sync.aligned 3;"),
        {"race"},
        r"async-proxy write(?s:.*)wgmma\.mma_async",
    ),
    "result read too early": (
        edit(r"wgmma\.wait_group\.sync\.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        {"wgmma"},
        "register of a wgmma in flight",
    ),
    "no acquire": (without_acquire, {"race"}, "read of .*bfloat16"),
    "no release": (edit(r"red\.release\.gpu\.global", "red.relaxed.gpu.global"), {"race"}, "read of .*bfloat16"),
    "counter never arrives": (edit(r"red\.release\.gpu\.global\.add\.u32 [^;]*;", ""), {"deadlock"}, "polls "),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str, seed: int) -> None:
    change, kinds, text = FAULTS[name]
    load_extension()
    sim = Simulator(seed=seed)
    with simulated_kernels(sim), sim.edited_ptx(change), pytest.raises(RuntimeError):
        PROBLEMS["several blocks and tiles"].run("cuda")
    reports = sim.take_reports()
    assert kinds & {kind for kind, _ in reports}
    assert re.search(text, "\n".join(text for _, text in reports))


def without_release_between_ranks(text: str) -> str:
    """Relaxed flags, and no fence before them."""
    return edit(r"fence\.acq_rel\.sys;", "")(edit(r"st\.release\.sys", "st.relaxed.sys")(text))


# The same for ranks that meet inside the kernel.
RANK_FAULTS = {
    "flag with device scope": (edit(r"st\.release\.sys", "st.release.gpu"), {"race"}, "data race"),
    "flag without release": (without_release_between_ranks, {"race"}, "data race"),
    "flag without acquire": (edit(r"ld\.acquire\.sys", "ld.relaxed.sys"), {"race"}, "data race"),
    "flag never set": (edit(r"st\.release\.sys[^;]*;", ""), {"deadlock"}, "rank 0(?s:.*)polls(?s:.*)rank 1"),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RANK_FAULTS)
def test_planted_faults_between_ranks(name: str, seed: int) -> None:
    change, kinds, text = RANK_FAULTS[name]
    load_extension()
    sim = Simulator(seed=seed, num_ranks=2, grace_ms=1000)
    with simulated_kernels(sim, device_barriers=True), sim.edited_ptx(change), pytest.raises(RuntimeError):
        PROBLEMS["two ranks"].run("cuda")
    reports = sim.take_reports()
    assert kinds & {kind for kind, _ in reports}
    assert re.search(text, "\n".join(text for _, text in reports))


def test_swapped_swizzle() -> None:
    """The 128-byte swizzle of the shared-memory descriptors becomes the 64-byte one: a wrong result, or a race."""
    load_extension()
    sim = Simulator()
    swap = edit(r"(or\.b64\s+%rd\d+, %rd\d+, )46116\d+;", r"\g<1>-9223371899348713472;")
    problem = PROBLEMS["small"]
    with simulated_kernels(sim), sim.edited_ptx(swap):
        try:
            output = problem.run("cuda")[0][1]
        except RuntimeError:
            assert sim.take_reports()
            return
    assert relative_l2(output, problem.run("torch")[0][1]) > 0.1


@pytest.mark.parametrize("seed", [0, 1])
def test_row_index_out_of_range(seed: int) -> None:
    """A row of the schedule names a token that does not exist."""
    problem = Problem()
    sim = Simulator(seed=seed)
    forward = functional.forward

    def corrupted(config: object, workspace: object, schedule: object, *rest: object) -> object:
        schedule.row_route[5] = 3 * problem.num_tokens * problem.top_k
        return forward(config, workspace, schedule, *rest)

    with simulated_kernels(sim), pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "forward", corrupted)
        with pytest.raises(RuntimeError, match=r"bounds: \d+ bytes at address"):
            problem.run("cuda")
    sim.take_reports()
