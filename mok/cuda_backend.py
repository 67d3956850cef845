"""The backend of the CUDA kernels: BF16, Hopper, forward. Backward still goes through the torch backend, and so, where
`MoKConfig.backend` leaves the choice, do calls that the kernels can not serve: another dtype, MXFP8, unaligned weights.

Calls on one workspace must follow each other on one stream: they share its counters and, with several ranks, its
peer-visible memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from mok import ops, torch_backend
from mok._types import (
    ExpertWeights,
    MainGrads,
    MoKForwardContext,
    MoKGradients,
    MoKSchedule,
    MoKWorkspace,
    NeedsGrad,
)
from mok.comm import ProcessGroupCommunicator

# The schedule kernel does, without the host waiting for it.
REPORTS_BAD_EXPERT_IDS = True


@dataclass
class CudaSchedule(MoKSchedule):
    """Also what the kernels read. row_route has room for the worst case, -1 after row R.

    blocks: int32 `[most blocks, 4]`, (expert, first row, rows, -) of each row block. num_blocks: int32 `[1]`.
    local_ids: int32 `[T, K]`, the ids that the schedule was made of.
    """

    blocks: Tensor
    num_blocks: Tensor
    local_ids: Tensor

    def tables(self) -> ops.ScheduleTables:
        return ops.ScheduleTables(
            self.expert_offsets,
            self.row_route,
            self.route_row,
            self.route_rank,
            self.blocks,
            self.num_blocks,
        )


def problem(device: torch.device) -> str | None:
    """Why the kernels can not serve this CUDA device; None if they can."""
    major, minor = torch.cuda.get_device_capability(device)
    known = [architecture.rstrip("af") for architecture in ops.ARCHITECTURES]
    if f"{major}{minor}" in known:
        return None
    return f"its compute capability is {major}.{minor}; the kernels were built for {', '.join(ops.ARCHITECTURES)}"


# Memory


@dataclass
class PeerMemory:
    """This rank's memory that its peers read and write, and where theirs lies. The one place that knows its layout."""

    memory: Tensor  # uint8
    pointers: list[int]  # of every rank, in rank order
    sizes: tuple[int, int, int, int]  # bytes of: ids, published x, route outputs, flags
    has_device_barriers: bool

    @staticmethod
    def make(workspace: MoKWorkspace) -> PeerMemory:
        size, tokens = workspace.communicator.size, workspace.num_local_tokens
        routes = tokens * workspace.topk
        sizes = (size * routes * 4, tokens * workspace.hidden_size * 2, routes * workspace.hidden_size * 2, size * 4)
        total = sum(_aligned(part) for part in sizes)
        communicator = workspace.communicator
        if not isinstance(communicator, ProcessGroupCommunicator):  # virtual ranks share one device
            memory = torch.zeros(total, dtype=torch.uint8, device=workspace.device)
            pointers = communicator.all_gather_object(memory.data_ptr())
            return PeerMemory(memory, pointers, sizes, has_device_barriers=False)
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(total, dtype=torch.uint8, device=workspace.device)
        handle = _symmetric_memory.rendezvous(memory, communicator.group)
        memory.zero_()
        torch.cuda.synchronize(workspace.device)
        communicator.barrier()
        return PeerMemory(memory, list(handle.buffer_ptrs), sizes, has_device_barriers=True)

    def part(self, index: int) -> list[int]:
        """The pointer of every rank to one part."""
        offset = sum(_aligned(size) for size in self.sizes[:index])
        return [pointer + offset for pointer in self.pointers]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


@dataclass
class CudaBuffers:
    """What the kernels keep between calls in a workspace."""

    error: ops.ErrorRecord
    counters: Tensor
    peers: PeerMemory | None
    block_counters: dict[str, ops.BlockCounters] = field(default_factory=dict)

    def counters_for(self, num_blocks: int, num_shared_blocks: int, device: torch.device) -> ops.BlockCounters:
        """Counters for at least so many blocks. The kernels leave them at zero."""
        counters = self.block_counters.get("largest")
        if counters is None or len(counters.gate_up) < num_blocks or len(counters.shared_down) < num_shared_blocks:
            if counters is not None:
                num_blocks = max(num_blocks, len(counters.gate_up))
                num_shared_blocks = max(num_shared_blocks, len(counters.shared_down))
            counters = ops.BlockCounters.new(num_blocks, num_shared_blocks, device)
            self.block_counters["largest"] = counters
        return counters


def make_buffers(workspace: MoKWorkspace) -> CudaBuffers:
    if workspace.topk > 32:
        raise ValueError(f"topk: expected at most 32, got {workspace.topk}")
    if workspace.hidden_size % 8:
        raise ValueError(f"hidden_size: expected a multiple of 8, got {workspace.hidden_size}")
    size = workspace.communicator.size
    if size > ops.MAX_RANKS:
        raise ValueError(f"group: expected at most {ops.MAX_RANKS} ranks, got {size}")
    counters = torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=workspace.device)
    return CudaBuffers(
        error=ops.ErrorRecord(ops.new_error_memory(), counters),
        counters=counters,
        peers=PeerMemory.make(workspace) if size > 1 else None,
    )


def _empty(workspace: MoKWorkspace, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=workspace.device)


def _launch(workspace: MoKWorkspace) -> ops.Launch:
    buffers: CudaBuffers = workspace.buffers
    buffers.error.raise_error()  # of an earlier call: the kernels run on while the host does
    return ops.Launch(
        workspace.device, workspace.config.num_sms or 0, workspace.config.timeout_s, buffers.error, buffers.counters
    )


def check(workspace: MoKWorkspace) -> None:
    """Wait for the GPU and raise what its kernels have reported."""
    torch.cuda.synchronize(workspace.device)
    workspace.buffers.error.raise_error()


def _ranks(workspace: MoKWorkspace, route_output: Tensor | None) -> ops.Ranks:
    peers: PeerMemory | None = workspace.buffers.peers
    rank, size = workspace.communicator.rank, workspace.communicator.size
    if peers is None:
        outputs = [] if route_output is None else [route_output.data_ptr()]
        return ops.Ranks(rank, size, workspace.num_local_tokens, [], [], outputs, [], False)
    ids, published_x, outputs, flags = (peers.part(index) for index in range(4))
    return ops.Ranks(
        rank, size, workspace.num_local_tokens, ids, published_x, outputs, flags, peers.has_device_barriers
    )


# The interface of a backend


def build_schedule(workspace: MoKWorkspace, top_experts: Tensor, num_local_experts: int) -> CudaSchedule:
    num_tokens, topk = top_experts.shape
    size = workspace.communicator.size
    capacity = num_tokens * topk if size == 1 else size * workspace.num_local_tokens * topk
    multiplier = workspace.config.schedule_capacity_multiplier
    if multiplier is not None:
        capacity = min(capacity, int(multiplier * workspace.num_local_tokens * topk))
    most_blocks = ops.max_blocks(capacity, num_local_experts)
    int32 = torch.int32
    schedule = CudaSchedule(
        expert_offsets=_empty(workspace, num_local_experts + 1, dtype=int32),
        row_route=_empty(workspace, capacity, dtype=int32),
        route_row=_empty(workspace, num_tokens, topk, dtype=int32),
        route_rank=_empty(workspace, num_tokens, topk, dtype=int32),
        blocks=_empty(workspace, most_blocks, 4, dtype=int32),
        num_blocks=_empty(workspace, 1, dtype=int32),
        local_ids=top_experts.to(int32),
    )
    launch, ranks = _launch(workspace), _ranks(workspace, None)
    top_experts = top_experts.contiguous()
    if size == 1:
        ops.schedule(launch, ranks, top_experts, num_local_experts, schedule.tables(), publish=False, sort=True)
        return schedule
    ops.schedule(launch, ranks, top_experts, num_local_experts, schedule.tables(), publish=True, sort=False)
    workspace.communicator.barrier()
    ops.schedule(launch, ranks, top_experts, num_local_experts, schedule.tables(), publish=False, sort=True)
    return schedule


def forward(
    workspace: MoKWorkspace,
    schedule: CudaSchedule,
    x: Tensor,
    router_weights: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    save_for_backward: bool,
) -> tuple[Tensor, MoKForwardContext]:
    found = _kernel_problem(x, weights)
    if found is not None:
        if workspace.config.backend is not None:
            raise ValueError(found)
        view = _TorchView(workspace, schedule)
        return torch_backend.forward(
            workspace, view.schedule, x, router_weights, weights, swiglu_limit, save_for_backward
        )
    shared = cast(ops.Mlp, weights[:3]) if weights.shared_gate is not None else None
    routed = cast(ops.Mlp, weights[3:])
    single = workspace.communicator.size == 1
    num_tokens, topk = router_weights.shape
    route_output = _empty(workspace, num_tokens * topk, workspace.hidden_size) if single else None
    launch, ranks = _launch(workspace), _ranks(workspace, route_output)
    buffers = _forward_buffers(workspace, schedule, x, shared, routed, save_for_backward)
    counters = workspace.buffers.counters_for(
        schedule.blocks.shape[0], -(-num_tokens // ops.BLOCK_ROWS) if shared else 0, workspace.device
    )
    router_weights = router_weights.contiguous()

    def run(**parts: bool) -> None:
        ops.forward(
            launch,
            ranks,
            schedule.tables(),
            counters,
            x,
            router_weights,
            shared,
            routed,
            swiglu_limit,
            buffers,
            **parts,
        )

    if single or ranks.device_barriers:
        run(publish=not single, gemm=True, combine=True)
    else:
        run(publish=True, gemm=False, combine=False)
        workspace.communicator.barrier()
        run(publish=False, gemm=True, combine=False)
        workspace.communicator.barrier()
        run(publish=False, gemm=False, combine=True)
        workspace.communicator.barrier()
    empty = x.new_empty(0)
    return buffers.output, MoKForwardContext(
        empty if buffers.gate_up is None else buffers.gate_up,
        empty if buffers.shared_gate_up is None else buffers.shared_gate_up,
    )


def _kernel_problem(x: Tensor, weights: ExpertWeights) -> str | None:
    """What the kernels can not read, as an error message; None if they can read all."""
    if x.dtype != torch.bfloat16:
        return f'x: expected torch.bfloat16 with MoKConfig(backend="cuda"), got {x.dtype}'
    for name, weight in weights._asdict().items():
        if isinstance(weight, tuple):
            return f'{name}: expected bfloat16 with MoKConfig(backend="cuda"), got MXFP8'
        if weight is None:
            continue
        misaligned = [stride for stride in weight.stride()[:-1] if stride % 8]
        if weight.data_ptr() % 16 or misaligned or weight.shape[-1] % 8:
            return (
                f"{name}: expected rows of a multiple of 8 elements, aligned to 16 bytes, with "
                f'MoKConfig(backend="cuda"), got shape {list(weight.shape)}, strides {list(weight.stride())}'
            )
    return None


def _kept_rows(workspace: MoKWorkspace, schedule: CudaSchedule) -> int:
    """Routed rows whose gate and up are kept for backward; it computes those of the others again.

    With one rank that is all. With several, where the schedule has room for the rows of all ranks, twice an even share.
    """
    most = schedule.row_route.numel()
    kept = workspace.config.macrobatch_size
    if kept is None:
        kept = most if workspace.communicator.size == 1 else 2 * workspace.num_local_tokens * workspace.topk
    return min(most, kept)


def _forward_buffers(
    workspace: MoKWorkspace,
    schedule: CudaSchedule,
    x: Tensor,
    shared: ops.Mlp | None,
    routed: ops.Mlp,
    save_for_backward: bool,
) -> ops.ForwardBuffers:
    sms = workspace.config.num_sms or ops.num_sms(workspace.device)
    num_tokens, width = x.shape[0], routed[0].shape[-2]
    shared_width = shared[0].shape[0] if shared else 0
    plan = ops.segment_plan(workspace.hidden_size, width, sms)
    shared_plan = ops.segment_plan(workspace.hidden_size, shared_width, sms) if shared else None

    def ring(ring_blocks: int, most_blocks: int, columns: int) -> Tensor:
        return _empty(workspace, min(ring_blocks, most_blocks) * ops.BLOCK_ROWS, columns)

    most_blocks = schedule.blocks.shape[0]
    most_shared_blocks = -(-num_tokens // ops.BLOCK_ROWS)
    return ops.ForwardBuffers(
        output=torch.empty_like(x),
        activation=ring(plan.ring_blocks, most_blocks, width),
        gate_up=_empty(workspace, _kept_rows(workspace, schedule), 2 * width) if save_for_backward else None,
        shared_activation=(
            ring(shared_plan.ring_blocks, most_shared_blocks, shared_width) if shared_plan is not None else None
        ),
        shared_gate_up=_empty(workspace, num_tokens, 2 * shared_width) if shared and save_for_backward else None,
        shared_output=_empty(workspace, num_tokens, workspace.hidden_size) if shared else None,
        gathered_x=ring(plan.ring_blocks, most_blocks, workspace.hidden_size),
    )


class _TorchView:
    """A CUDA schedule and context as the torch backend wants them: cut to the R rows that there are."""

    def __init__(self, workspace: MoKWorkspace, schedule: CudaSchedule) -> None:
        self.workspace, self.cuda_schedule = workspace, schedule

    @cached_property
    def num_rows(self) -> int:
        return int(self.cuda_schedule.expert_offsets[-1].item())

    @cached_property
    def schedule(self) -> torch_backend.TorchSchedule:
        cuda = self.cuda_schedule
        plain = MoKSchedule(cuda.expert_offsets, cuda.row_route[: self.num_rows], cuda.route_row, cuda.route_rank)
        num_experts = (cuda.expert_offsets.numel() - 1) * self.workspace.communicator.size
        return torch_backend.add_travel(self.workspace, plain, cuda.local_ids, num_experts)

    def context(
        self, context: MoKForwardContext, x: Tensor, weights: ExpertWeights, swiglu_limit: float | None
    ) -> MoKForwardContext:
        if context.gate_up.shape[0] < self.num_rows:
            context = torch_backend.recompute_forward_context(self.workspace, self.schedule, x, weights, swiglu_limit)
        return MoKForwardContext(context.gate_up[: self.num_rows], context.shared_gate_up)


def recompute_forward_context(
    workspace: MoKWorkspace, schedule: CudaSchedule, x: Tensor, weights: ExpertWeights, swiglu_limit: float | None
) -> MoKForwardContext:
    view = _TorchView(workspace, schedule)
    return torch_backend.recompute_forward_context(workspace, view.schedule, x, weights, swiglu_limit)


def backward(
    workspace: MoKWorkspace,
    schedule: CudaSchedule,
    context: MoKForwardContext,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    weights: ExpertWeights,
    swiglu_limit: float | None,
    main_grads: MainGrads,
    needs_grad: NeedsGrad,
) -> MoKGradients:
    view = _TorchView(workspace, schedule)
    return torch_backend.backward(
        workspace,
        view.schedule,
        view.context(context, x, weights, swiglu_limit),
        grad_output,
        x,
        router_weights,
        weights,
        swiglu_limit,
        main_grads,
        needs_grad,
    )
