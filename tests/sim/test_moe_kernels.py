"""The project's schedule and forward kernels, in the simulator, against the torch backend: several
interleavings, 1, 2 and 4 ranks, cruel routings. And faults planted into their PTX, each of which must be found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from moe_kernels import load_extension, simulated_kernels
from moe_problems import PROBLEMS, RANK_PROBLEMS, Problem, check_results, edit, simulate
from simulator import Simulator

from mok import functional
from mok.testing import relative_l2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PROBLEMS)
def test_forward(name: str, seed: int) -> None:
    check_results(simulate(PROBLEMS[name], seed), PROBLEMS[name])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RANK_PROBLEMS)
def test_ranks_that_meet_inside_the_kernel(name: str, seed: int) -> None:
    check_results(simulate(PROBLEMS[name], seed, device_barriers=True), PROBLEMS[name])


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
    with simulated_kernels(sim), sim.edited_ptx("Forward", change), pytest.raises(RuntimeError):
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
    with simulated_kernels(sim, device_barriers=True), sim.edited_ptx("Forward", change), pytest.raises(RuntimeError):
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
    with simulated_kernels(sim), sim.edited_ptx("Forward", swap):
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
