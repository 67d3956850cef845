"""Expert parallelism as on several GPUs: one launch a rank, and the ranks meet inside the kernel, in peer memory."""

from __future__ import annotations

from unittest import mock

import pytest
from moe_kernels import load_extension, simulated_kernels
from simulator import Simulator
from test_moe_kernels import Problem

from mok.testing import relative_l2


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("problem", [Problem(num_ranks=2, shared_size=64), Problem(num_ranks=4, routing="one expert")])
def test_ranks_meet_inside_the_kernel(problem: Problem, seed: int) -> None:
    load_extension()
    from mok import cuda_backend

    make = cuda_backend.PeerMemory.make

    def make_as_on_several_gpus(workspace: object) -> object:
        peers = make(workspace)
        peers.has_device_barriers = True
        return peers

    sim = Simulator(seed=seed, num_ranks=problem.num_ranks)
    with (
        simulated_kernels(sim),
        mock.patch.object(cuda_backend.PeerMemory, "make", staticmethod(make_as_on_several_gpus)),
    ):
        actual = problem.run("cuda")
    sim.raise_reports()
    for (_, output, _), (_, expected, _) in zip(actual, problem.run("torch"), strict=True):
        assert relative_l2(output, expected) < 1e-3
