"""Expert parallelism: the same bits for every number of ranks, and errors on all ranks or none."""

from __future__ import annotations

import dataclasses
import gc
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moe_cases import ARGUMENTS, GRADIENTS, Problem, make_problem, run_mok

from mok import functional, reference
from mok.comm import Communicator, as_communicator
from mok.functional import MoKConfig
from mok.testing import VirtualGroup, assert_close_rel_l2, assert_same_bits

# The shared expert's weight gradients are of one rank's tokens; the others are of the whole batch.
SPLIT_BY_TOKEN = ("output", "d_x", "d_router_weights")
SPLIT_BY_EXPERT = ("d_routed_gate", "d_routed_up", "d_routed_down")
SHARED = ("d_shared_gate", "d_shared_up", "d_shared_down")


def even(num_tokens: int, size: int) -> list[int]:
    return [num_tokens // size] * size


def run_ranks(problem: Problem, splits: list[int], members: list | None = None) -> list[dict[str, torch.Tensor]]:
    """Per rank: output and gradients by name."""

    def rank(member):
        output, gradients = run_mok(problem.rank(member.rank(), splits), member, capacity=max(splits))
        return {"output": output, **dict(zip(GRADIENTS, gradients, strict=True))}

    return VirtualGroup(len(splits)).run(rank)


def assert_same_as_one_rank(problem: Problem, ranks: list[dict[str, torch.Tensor]]) -> None:
    output, gradients = run_mok(problem)
    expected = {"output": output, **dict(zip(GRADIENTS, gradients, strict=True))}
    for name in (*SPLIT_BY_TOKEN, *SPLIT_BY_EXPERT):
        assert_same_bits(name, torch.cat([rank[name] for rank in ranks]), expected[name])
    for name in SHARED:
        if expected[name] is not None:
            assert_close_rel_l2(name, sum(rank[name].double() for rank in ranks), expected[name], 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_same_bits_for_every_number_of_ranks(size: int, dtype: torch.dtype):
    problem = make_problem(104, 48, 32, 8, 3, shared_width=16, swiglu_limit=1.0, dtype=dtype)
    assert_same_as_one_rank(problem, run_ranks(problem, even(104, size)))


def test_same_bits_above_the_size_where_torch_uses_threads():
    problem = make_problem(1504, 96, 80, 8, 4, shared_width=64, dtype=torch.float32)
    assert_same_as_one_rank(problem, run_ranks(problem, even(1504, 2)))


@pytest.mark.parametrize("splits", [[0, 29], [29, 0], [1, 0, 27, 1], [0, 0, 0, 0, 0, 0, 0, 29]])
def test_ranks_may_have_different_numbers_of_tokens(splits: list[int]):
    problem = make_problem(dtype=torch.float32, shared_width=16)
    assert_same_as_one_rank(problem, run_ranks(problem, splits))


@pytest.mark.parametrize("expert", [-1, 0, 7])
def test_all_tokens_of_all_ranks_on_one_expert(expert: int):
    problem = make_problem(32, dtype=torch.float32, shared_width=None, top_experts=torch.full((32, 3), expert))
    assert_same_as_one_rank(problem, run_ranks(problem, even(32, 4)))


@pytest.mark.parametrize("splits", [[29], [10, 19], [3, 0, 20, 6]])
def test_schedule_is_that_of_the_reference(splits: list[int]):
    problem = make_problem()
    size, capacity = len(splits), 31
    ranks = [problem.rank(rank, splits).top_experts for rank in range(size)]
    expected = reference.build_schedule(ranks, num_local_experts=8 // size, num_local_tokens=capacity)

    def rank(member):
        config = MoKConfig()
        workspace = functional.create_workspace(
            config, member, device="cpu", num_local_tokens=capacity, hidden_size=24, topk=3
        )
        return functional.build_schedule(workspace, config, ranks[member.rank()], num_local_experts=8 // size)

    for actual, want in zip(VirtualGroup(size).run(rank), expected, strict=True):
        for field in dataclasses.fields(want):
            assert_same_bits(field.name, getattr(actual, field.name), getattr(want, field.name))


def test_recompute_without_saving_gives_the_same_gradients():
    problem = make_problem(32, dtype=torch.float32)

    def rank(member):
        mine = problem.rank(member.rank(), [16, 16])
        config = MoKConfig()
        workspace = functional.create_workspace(
            config, member, device="cpu", num_local_tokens=16, hidden_size=24, topk=3
        )
        schedule = functional.build_schedule(workspace, config, mine.top_experts, num_local_experts=4)
        functional.forward(config, workspace, schedule, *mine.tensors(), save_for_backward=False)
        context = functional.recompute_forward_context(
            config, workspace, schedule, mine.x, *mine.shared[:2], *mine.routed()[:2], mine.swiglu_limit
        )
        return functional.backward(config, workspace, schedule, context, mine.grad_output, *mine.tensors())

    expected = run_ranks(problem, [16, 16])
    for actual, want in zip(VirtualGroup(2).run(rank), expected, strict=True):
        for name, gradient in zip(GRADIENTS, actual, strict=True):
            assert_same_bits(name, gradient, want[name])


# Errors: what one rank does wrong, all ranks raise. The group's time limit is a hang's.


def spoiled_call(member, call: str, spoil: dict[str, object]):
    """All four calls on this rank, where `spoil` replaces arguments of one of them on rank 1."""
    wrong = spoil if member.rank() == 1 else {}
    mine = make_problem(8, dtype=torch.float32).rank(member.rank(), [4, 4])
    config = MoKConfig()
    sizes = {"num_local_tokens": 4, "hidden_size": 24, "topk": 3}
    workspace = functional.get_workspace(config, member, device="cpu", **sizes | (wrong if call == "workspace" else {}))
    schedule_options = {"top_experts": mine.top_experts, "num_local_experts": 4}
    schedule = functional.build_schedule(workspace, config, **schedule_options | (wrong if call == "schedule" else {}))
    tensors = dict(zip(ARGUMENTS, mine.tensors(), strict=True)) | (wrong if call == "forward" else {})
    _, context = functional.forward(config, workspace, schedule, **tensors)
    options = {"grad_output": mine.grad_output, **tensors} | (wrong if call == "backward" else {})
    functional.backward(config, workspace, schedule, context, **options)


SPOILED = {
    "hidden_size": ("workspace", {"hidden_size": 32}, r"hidden_size: .* got rank 0: 24; rank 1: 32"),
    "topk": ("workspace", {"topk": 2}, r"topk: expected the same on every rank, got rank 0: 3; rank 1: 2"),
    "capacity": ("workspace", {"num_local_tokens": 5}, r"num_local_tokens: .* rank 0: 4; rank 1: 5"),
    "size type": ("workspace", {"topk": "3"}, r"rank 1: topk: expected int, got str '3'"),
    "experts": ("schedule", {"num_local_experts": 3}, r"num_local_experts: .* rank 0: 4; rank 1: 3"),
    "ids": ("schedule", {"top_experts": torch.full((4, 3), 8)}, r"rank 1: top_experts: .* -1 .* to 7, got 8 to 8"),
    "ids shape": ("schedule", {"top_experts": torch.zeros(4, 2).long()}, r"rank 1: top_experts: expected .*\[T, 3\]"),
    "x shape": ("forward", {"x": torch.zeros(4, 23)}, r"rank 1: x: .*\[4, 24\] on cpu, got torch.float32 \[4, 23\]"),
    "x dtype": ("forward", {"x": torch.zeros(4, 24).int()}, r"rank 1: x: expected .* got torch.int32"),
    "x device": ("forward", {"x": torch.zeros(4, 24, device="meta")}, r"rank 1: x: expected .* on cpu, got .* on meta"),
    "x type": ("forward", {"x": None}, r"rank 1: x: expected a tensor, .* got NoneType"),
    "weights": ("forward", {"routed_down": torch.zeros(4, 24, 8)}, r"rank 1: routed_down: expected .*\[4, 24, 16\]"),
    "gradient": ("backward", {"grad_output": torch.zeros(3, 24)}, r"rank 1: grad_output: expected .*\[4, 24\]"),
    "needs": ("backward", {"needs_grad": [False] * 8}, r"needs_grad.x: .* got rank 0: True; rank 1: False"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_all_ranks_raise_the_same_error(case: str):
    call, spoil, message = SPOILED[case]
    functional.clear_workspace_cache()
    errors = [None, None]

    def rank(member):
        try:
            spoiled_call(member, call, spoil)
        except (TypeError, ValueError) as error:
            errors[member.rank()] = error

    VirtualGroup(2, timeout_s=20).run(rank)
    with pytest.raises(type(errors[1]), match=message):
        raise errors[1]
    assert str(errors[0]) == str(errors[1]) and type(errors[0]) is type(errors[1])


def test_the_unspoiled_call_passes():
    VirtualGroup(2, timeout_s=20).run(lambda member: spoiled_call(member, "none", {}))


def test_a_rank_that_needs_a_new_workspace_meets_one_that_does_not():
    """Rank 0 finds its workspace in the cache and goes on to its schedule; rank 1 asks for another hidden size."""
    functional.clear_workspace_cache()
    group = VirtualGroup(2, timeout_s=20)
    group.run(lambda member: spoiled_call(member, "none", {}))
    with pytest.raises(ValueError, match=r"hidden_size: .* rank 0: 24; rank 1: 32"):
        group.run(lambda member: spoiled_call(member, "workspace", {"hidden_size": 32}))
    functional.clear_workspace_cache()


def test_capacity_error_is_raised_on_all_ranks():
    ids = torch.zeros(8, 1, dtype=torch.int64)
    raised = []

    def rank(member):
        config = MoKConfig(schedule_capacity_multiplier=1.5)
        workspace = functional.create_workspace(config, member, device="cpu", num_local_tokens=8, hidden_size=4, topk=1)
        with pytest.raises(ValueError, match=r"schedule_capacity_multiplier: expected at most 12 .* got 16 on rank 0"):
            functional.build_schedule(workspace, config, ids, num_local_experts=1)
        raised.append(member.rank())

    VirtualGroup(2, timeout_s=20).run(rank)
    assert sorted(raised) == [0, 1]


# The groups themselves


def check_collectives(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    communicator.barrier()
    assert communicator.all_gather_object({"rank": rank}) == [{"rank": other} for other in range(size)]
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        gathered = communicator.all_gather(torch.full((2, 3), rank, dtype=dtype))
        assert_same_bits("all_gather", gathered, torch.arange(size).to(dtype)[:, None, None].expand(size, 2, 3))
        # Rank r sends r rows to rank 0, r + 1 to rank 1 and so on; each says where it is from and where it goes.
        send, receive = [rank + to for to in range(size)], [source + rank for source in range(size)]
        rows = torch.tensor([[rank, to] for to in range(size) for _ in range(send[to])], dtype=dtype).view(-1, 2)
        expected = torch.tensor([[s, rank] for s in range(size) for _ in range(receive[s])], dtype=dtype).view(-1, 2)
        assert_same_bits("all_to_all_rows", communicator.all_to_all_rows(rows, send, receive), expected)
    total = communicator.all_reduce_sum(torch.tensor([1.0, float(rank)]))
    assert total.tolist() == [size, size * (size - 1) / 2]
    communicator.agree("call", {"a": 1})
    with pytest.raises(ValueError, match="bad" if size == 1 else f"rank {size - 1}: bad"):
        communicator.agree("call", {}, ValueError("bad") if rank == size - 1 else None)


@pytest.mark.parametrize("size", [1, 3])
def test_virtual_group(size: int):
    VirtualGroup(size).run(lambda member: check_collectives(as_communicator(member)))
    assert VirtualGroup(size).run(lambda member: (member.rank(), member.size())) == [(r, size) for r in range(size)]


def test_a_failing_virtual_rank_ends_the_others_at_once():
    group = VirtualGroup(3)

    def rank(member):
        if member.rank() == 1:
            raise KeyError("rank 1 fails")
        member.communicator.barrier()

    threads = threading.active_count()
    with pytest.raises(KeyError, match="rank 1 fails"):
        group.run(rank)
    assert threading.active_count() == threads
    group.run(lambda member: member.communicator.barrier())  # and the group can be used again


def gloo_rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    check_collectives(as_communicator(dist.group.WORLD))
    for dtype in (torch.float32, torch.bfloat16):
        problem = make_problem(32, 48, 32, 8, 3, shared_width=16, dtype=dtype)
        for splits in ([16, 16], [32, 0]):
            mine = problem.rank(rank, splits)
            output, gradients = run_mok(mine, dist.group.WORLD, capacity=32)
            named = {"output": output, **dict(zip(GRADIENTS, gradients, strict=True))}
            ranks = [None, None]
            dist.all_gather_object(ranks, named)
            assert_same_as_one_rank(problem, ranks)
    with pytest.raises(ValueError, match=r"rank 1: x: expected .* got torch.float32 \[4, 23\]"):
        spoiled_call(dist.group.WORLD, "forward", {"x": torch.zeros(4, 23)})
    with pytest.raises(ValueError, match=r"hidden_size: .* rank 0: 24; rank 1: 32"):
        spoiled_call(dist.group.WORLD, "workspace", {"hidden_size": 32})
    dist.destroy_process_group()
    # What pytest.raises has caught still refers to the group, and threads of a group that outlives Python abort it.
    functional.clear_workspace_cache()
    gc.collect()


@pytest.mark.timeout(180)
def test_two_gloo_processes(tmp_path: Path):
    mp.spawn(gloo_rank, (str(tmp_path / "store"),), nprocs=2)
