"""Planted faults in small kernels: each must be found, by the check that is meant for it, with a text that helps."""

from __future__ import annotations

import threading

import pytest
import torch
from cases import gemm_inputs, kernel_module, launch_gemm, random_bits
from simulator import ALL_CHECKS, CHECKS, KERNELS, Simulator, SimulatorError, compile_ptx
from torch import Tensor

SEEDS = [0, 1, 2, 3]


def launch(kernel: str, *args: object, seed: int = 0, block: int = 64, grid: int = 1, **options: object) -> None:
    sim = Simulator(seed=seed)
    kernel_module(sim, "faults").launch(kernel, args=args, block=block, grid=grid, **options)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def found(kind: str, match: str, kernel: str, *args: object, **options: object) -> None:
    with pytest.raises(SimulatorError, match=match) as raised:
        launch(kernel, *args, **options)
    assert kind in raised.value.kinds, raised.value.kinds


def test_out_of_bounds() -> None:
    rows = ints(32)
    launch("out_of_bounds", rows, ints(8, 32), ints(32), block=32)
    rows[7] = 8
    found(
        "bounds",
        r"behind the end of tensor 1.*\n.*faults\.cu:6",
        "out_of_bounds",
        rows,
        ints(8, 32),
        ints(32),
        block=32,
    )


def test_misaligned() -> None:
    found("align", r"not a multiple of 16\n.*faults\.cu:10", "misaligned", ints(64), ints(32, 4), block=32)


@pytest.mark.parametrize(
    ("load", "store", "message"),
    [
        ((3, 3), (0, 4), "innermost coordinate 3"),
        ((4, 3), (2, 3), "innermost coordinate 2"),
        ((4, 3), (-4, 3), "negative coordinate"),
        ((4, 3), (0, -1), "negative coordinate"),
    ],
)
def test_tile_at_a_wrong_place(load: tuple[int, int], store: tuple[int, int], message: str) -> None:
    sim = Simulator()
    source, target, raw = ints(40, 36), ints(40, 36), ints(8, 8)
    args = [*(sim.tensor_map(t, (8, 8)) for t in (source, target)), raw, *load, *store, 256]
    with pytest.raises(SimulatorError, match=message):
        kernel_module(sim, "copies").launch("tensor_tile", args=args, block=64, shared=8192)


@pytest.mark.parametrize("seed", SEEDS)
def test_uninitialised(seed: int) -> None:
    found("init", "uninitialised memory: shared memory", "uninitialised_shared", ints(64), seed=seed)
    scratch = ints(2)
    found(
        "init",
        "uninitialised memory: tensor 0",
        "uninitialised_global",
        scratch,
        ints(64),
        outputs=[scratch],
        seed=seed,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_barrier(seed: int) -> None:
    found("race", r"(?s)shared memory.*faults\.cu:2\d", "missing_barrier", ints(64), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_publication(seed: int) -> None:
    out = ints(64)
    launch("publish", ints(64), ints(1), out, 0, grid=2, seed=seed)
    assert out.tolist() == list(range(63, -1, -1))
    for kind in (1, 2, 3, 4):  # no barrier in the CTA, no release, no acquire, too narrow a scope
        found("race", "(?s)read of tensor 0.*write", "publish", ints(64), ints(1), ints(64), kind, grid=2, seed=seed)


def test_read_only_path() -> None:
    found("nc", "ld.global.nc", "read_only_path", ints(64), ints(64))


def test_barriers_that_wait_for_ever() -> None:
    found("deadlock", r"named barrier 1: 32 of 64 threads \| faults\.cu", "half_a_barrier", ints(64))
    found("deadlock", r"(?s)warp 0.*warp 1.*named barrier 0", "never_arrives", ints(1), ints(64))


def test_time_limits_end_waits() -> None:
    out = ints(64)
    launch("time_limit", ints(1), out)
    assert out.tolist() == [2] * 64


@pytest.mark.parametrize("seed", SEEDS)
def test_mbarrier_misuse(seed: int) -> None:
    found("barrier", "ordinary access to the mbarrier", "ordinary_access_to_mbarrier", ints(64), seed=seed)
    with pytest.raises(SimulatorError) as raised:
        launch("mbarrier_without_init_order", ints(64), seed=seed)
    assert raised.value.kinds[0] in ("race", "barrier")  # no order, or not even initialised yet


def test_absent_lane() -> None:
    found("barrier", "lane 0 reads lane 20", "shuffle_from_absent_lane", ints(32), block=32)


def test_copies_at_exit() -> None:
    for seed in SEEDS:
        found(
            "leak",
            "in flight|not waited",
            "copy_in_flight_at_exit",
            torch.zeros(32),
            torch.zeros(32),
            block=32,
            seed=seed,
        )
    ptx = compile_ptx(KERNELS / "copies.cu", ["NO_WAIT"])
    with pytest.raises(SimulatorError, match=r"wait_group\.read"):
        args = [torch.zeros(4, 256), torch.zeros(4, 256), torch.zeros(256)]
        Simulator().load(ptx).launch("bulk", args=args, grid=4, block=64)


def test_bulk_store_without_proxy_fence() -> None:
    ptx = compile_ptx(KERNELS / "copies.cu", ["NO_PROXY_FENCE"])
    with pytest.raises(SimulatorError, match=r"(?s)no fence\.proxy\.async.*cp\.async\.bulk.*st\.shared") as raised:
        args = [torch.zeros(4, 256), torch.zeros(4, 256), torch.zeros(256)]
        Simulator().load(ptx).launch("bulk", args=args, grid=4, block=64)
    assert set(raised.value.kinds) == {"proxy"}


def test_register_pool() -> None:
    ptx = compile_ptx(KERNELS / "barriers.cu", ["NO_DECREASE"])
    with pytest.raises(SimulatorError, match=r"(?s)deadlock.*registers"):
        Simulator().load(ptx).launch("registers", args=[ints(256)], block=256)


# What each RING_BUG of barriers.cu does to a ring of two slots: either count too high, a slot reused too early.
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("bug", "kinds"), [(1, ["deadlock"]), (2, ["deadlock"]), (3, ["race", "deadlock"])])
def test_ring(bug: int, kinds: list[str], seed: int) -> None:
    ptx = compile_ptx(KERNELS / "barriers.cu", [f"RING_BUG={bug}"])
    with pytest.raises(SimulatorError) as raised:
        Simulator(seed=seed).load(ptx).launch("ring", args=[random_bits(1, 9, 32), ints(9, 32), 9], block=64)
    assert raised.value.kinds[0] in kinds


# BUG of gemm.cu -> the check that must find it, and what its text must name.
GEMM_BUGS = {
    1: ("proxy", r"no fence\.proxy\.async(?s:.*)cp\.async\.bulk\.tensor(?s:.*)st\.shared"),
    2: ("race|barrier", r"async-proxy write(?s:.*)wgmma|but only 0 of 1 are still expected"),
    3: ("race", r"async-proxy write(?s:.*)wgmma"),
    5: ("race", r"ld\.global\.u16(?s:.*)cp\.async\.bulk\.tensor"),
    6: ("deadlock", r"mbarrier shared\+\d+: awaited parity 0, 0 phases complete, 0 of 1 arrivals missing, tx 16"),
    7: ("race", r"write of shared memory(?s:.*)st\.shared(?s:.*)cp\.async\.bulk\.tensor"),
    8: ("wgmma", "register of a wgmma in flight"),
    9: ("proxy", "no fence.mbarrier_init"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", GEMM_BUGS)
def test_gemm_bugs(bug: int, seed: int) -> None:
    kind, text = GEMM_BUGS[bug]
    with pytest.raises(SimulatorError, match=text) as raised:
        launch_gemm(Simulator(seed=seed), compile_ptx(KERNELS / "gemm.cu", [f"BUG={bug}"]), grid=2)
    assert set(kind.split("|")) & set(raised.value.kinds)


def test_swapped_swizzle() -> None:
    """Reads the right bytes in a wrong order: no check, but a wrong result."""
    sim = Simulator(checks=ALL_CHECKS - CHECKS["race"])
    c = launch_gemm(sim, compile_ptx(KERNELS / "gemm.cu", ["BUG=4"]))["c~"]
    a, b = gemm_inputs()
    assert (c.double() - a.double() @ b.double().T).norm() > 0.5 * c.double().norm()


def test_checks_can_be_switched_off() -> None:
    out = ints(64)
    sim = Simulator(checks=ALL_CHECKS - CHECKS["race"] - CHECKS["init"])
    kernel_module(sim, "faults").launch("missing_barrier", args=[out], block=64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [0, 1])
def test_ranks_run_together(kind: int, seed: int) -> None:
    """Two launches from two host threads wait for each other; device scope does not reach the other rank."""
    sim = Simulator(seed=seed, num_ranks=2)
    module = kernel_module(sim, "faults")
    data, flags, outs = [ints(64), ints(64)], [ints(1), ints(1)], [ints(64), ints(64)]
    for i, tensor in enumerate([*data, *flags]):
        sim.add_memory(tensor, f"shared tensor {i}")
    errors: list[SimulatorError] = []

    def call(rank: int) -> None:
        args = [data[rank], flags[rank], data[1 - rank], flags[1 - rank], outs[rank], kind]
        try:
            module.launch("exchange", args=args, block=64, rank=rank)
        except SimulatorError as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if kind == 0:
        assert not errors
        assert all(out.tolist() == list(range(64)) for out in outs)
    else:
        assert "race" in errors[0].kinds
