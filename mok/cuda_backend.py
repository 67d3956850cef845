"""The backend of the CUDA kernels: BF16 on Hopper, forward and backward. Where `MoKConfig.backend` leaves the choice,
calls that the kernels can not serve (another dtype, MXFP8, unaligned weights) go through the torch backend.

Calls on one workspace must follow each other on one stream: they share its counters and, with several ranks, its
peer-visible memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, cast

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
    expert_blocks: int32 `[E_l + 1]`, the first block of each expert.
    local_ids: int32 `[T, K]`, the ids that the schedule was made of.
    """

    blocks: Tensor
    num_blocks: Tensor
    expert_blocks: Tensor
    local_ids: Tensor

    def tables(self) -> ops.ScheduleTables:
        return ops.ScheduleTables(
            self.expert_offsets,
            self.row_route,
            self.route_row,
            self.route_rank,
            self.blocks,
            self.num_blocks,
            self.expert_blocks,
        )


def problem(device: torch.device) -> str | None:
    """Why the kernels can not serve this CUDA device; None if they can."""
    major, minor = torch.cuda.get_device_capability(device)
    known = [architecture.rstrip("af") for architecture in ops.ARCHITECTURES]
    if f"{major}{minor}" in known:
        return None
    return f"its compute capability is {major}.{minor}; the kernels were built for {', '.join(ops.ARCHITECTURES)}"


# Memory


class PeerParts(NamedTuple):
    """The parts of `PeerMemory`, their bytes or their pointers."""

    ids: Any
    x: Any
    d_output: Any
    route_output: Any
    router_weights: Any
    d_router_weights: Any
    flags: Any


@dataclass
class PeerMemory:
    """This rank's memory that its peers read and write, and where theirs lies. The one place that knows its layout."""

    memory: Tensor  # uint8
    pointers: list[int]  # of every rank, in rank order
    sizes: PeerParts  # in bytes
    has_device_barriers: bool

    @staticmethod
    def make(workspace: MoKWorkspace) -> PeerMemory:
        size, tokens = workspace.communicator.size, workspace.num_local_tokens
        routes = tokens * workspace.topk
        token_bytes, route_bytes = tokens * workspace.hidden_size * 2, routes * workspace.hidden_size * 2
        sizes = PeerParts(size * routes * 4, token_bytes, token_bytes, route_bytes, routes * 4, routes * 4, size * 4)
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

    def _offsets(self) -> list[int]:
        ends = accumulate(_aligned(size) for size in self.sizes)
        return [0, *ends]

    def parts(self) -> PeerParts:
        """The pointers of every rank to each part."""
        return PeerParts(*([pointer + offset for pointer in self.pointers] for offset in self._offsets()[:-1]))

    def own(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's memory of one part, flat."""
        index = PeerParts._fields.index(name)
        offset = self._offsets()[index]
        return self.memory[offset : offset + self.sizes[index]].view(dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


@dataclass
class CudaBuffers:
    """What the kernels keep between calls in a workspace."""

    error: ops.ErrorRecord
    counters: Tensor
    zero_row: Tensor  # bf16 [H]
    peers: PeerMemory | None
    block_counters: dict[str, ops.BlockCounters] = field(default_factory=dict)

    def counters_for(self, num_blocks: int, num_shared_blocks: int, device: torch.device) -> ops.BlockCounters:
        """Counters for at least so many blocks. The kernels leave them at zero."""
        counters = self.block_counters.get("largest")
        if counters is None or len(counters.first) < num_blocks or len(counters.shared_first) < num_shared_blocks:
            if counters is not None:
                num_blocks = max(num_blocks, len(counters.first))
                num_shared_blocks = max(num_shared_blocks, len(counters.shared_first))
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
        zero_row=torch.zeros(workspace.hidden_size, dtype=torch.bfloat16, device=workspace.device),
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


def _ranks(
    workspace: MoKWorkspace,
    route_output: Tensor | None = None,
    router_weights: Tensor | None = None,
    d_router_weights: Tensor | None = None,
) -> ops.Ranks:
    """The tensors are those of a single rank; several have them in their peer-visible memory."""
    peers: PeerMemory | None = workspace.buffers.peers
    own = _pointers(route_output), _pointers(router_weights), _pointers(d_router_weights)
    parts = PeerParts([], [], [], *own, []) if peers is None else peers.parts()
    return ops.Ranks(
        workspace.communicator.rank,
        workspace.communicator.size,
        workspace.num_local_tokens,
        *parts,
        device_barriers=peers is not None and peers.has_device_barriers,
    )


def _pointers(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else [tensor.data_ptr()]


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
        expert_blocks=_empty(workspace, num_local_experts + 1, dtype=int32),
        local_ids=top_experts.to(int32),
    )
    launch, ranks = _launch(workspace), _ranks(workspace)
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
    if _goes_to_torch(workspace, x, weights):
        view = _TorchView(workspace, schedule)
        return torch_backend.forward(
            workspace, view.schedule, x, router_weights, weights, swiglu_limit, save_for_backward
        )
    call = _Call(workspace, schedule, x, weights, swiglu_limit)
    kept_rows = _kept_rows(workspace, schedule) if save_for_backward else 0
    num_tokens, topk = router_weights.shape
    route_output = _empty(workspace, num_tokens * topk, workspace.hidden_size) if call.is_single else None
    buffers = call.forward_buffers(torch.empty_like(x), kept_rows, save_for_backward)
    router_weights = router_weights.contiguous()
    call.run(lambda parts: call.forward(_ranks(workspace, route_output), buffers, parts, router_weights))
    return cast(Tensor, buffers.output), _context(x, buffers)


def _context(x: Tensor, buffers: ops.ForwardBuffers) -> MoKForwardContext:
    empty = x.new_empty(0)
    return MoKForwardContext(
        empty if buffers.gate_up is None else buffers.gate_up,
        empty if buffers.shared_gate_up is None else buffers.shared_gate_up,
    )


class _Call:
    """One forward, recomputation or backward: what its launches share."""

    def __init__(
        self,
        workspace: MoKWorkspace,
        schedule: CudaSchedule,
        x: Tensor,
        weights: ExpertWeights,
        swiglu_limit: float | None,
    ) -> None:
        self.workspace, self.schedule, self.x, self.swiglu_limit = workspace, schedule, x, swiglu_limit
        self.routed = cast(ops.Mlp, weights[3:])
        self.shared = cast(ops.Mlp, weights[:3]) if weights.shared_gate is not None else None
        self.launch = _launch(workspace)
        self.is_single = workspace.communicator.size == 1
        self.has_device_barriers = self.is_single or workspace.buffers.peers.has_device_barriers
        self.num_tokens, self.hidden_size = x.shape
        self.width = self.routed[0].shape[-2]
        self.shared_width = self.shared[0].shape[0] if self.shared else 0
        self.most_blocks = schedule.blocks.shape[0]
        most_shared_blocks = -(-self.num_tokens // ops.BLOCK_ROWS)
        self.counters = workspace.buffers.counters_for(
            self.most_blocks, most_shared_blocks if self.shared else 0, workspace.device
        )

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return _empty(self.workspace, *shape, dtype=dtype)

    def run(self, launch: Callable[[ops.Parts], None]) -> None:
        """All of a call in one launch; virtual ranks, which can not wait for each other inside, in three."""
        if self.has_device_barriers:
            launch(ops.Parts(not self.is_single, True, True, combine_by_row=self.is_single))
            return
        for part in range(3):
            launch(ops.Parts(part == 0, part == 1, part == 2))
            self.workspace.communicator.barrier()

    def ring(self, width: int, most_blocks: int, columns: int) -> Tensor:
        sms = self.workspace.config.num_sms or ops.num_sms(self.workspace.device)
        blocks = min(ops.ring_blocks(self.hidden_size, width, sms), most_blocks)
        return self.empty(blocks * ops.BLOCK_ROWS, columns)

    def forward_buffers(self, output: Tensor | None, kept_rows: int, keeps: bool) -> ops.ForwardBuffers:
        """For a forward, or without an output for gate and up alone. kept_rows: rows whose gate and up are kept."""
        wants_output = output is not None
        has_shared = self.shared is not None
        most_shared_blocks = -(-self.num_tokens // ops.BLOCK_ROWS)
        return ops.ForwardBuffers(
            output=output,
            activation=self.ring(self.width, self.most_blocks, self.width) if wants_output else None,
            gate_up=self.empty(kept_rows, 2 * self.width) if keeps else None,
            shared_activation=(
                self.ring(self.shared_width, most_shared_blocks, self.shared_width)
                if wants_output and has_shared
                else None
            ),
            shared_gate_up=self.empty(self.num_tokens, 2 * self.shared_width) if keeps and has_shared else None,
            shared_output=self.empty(self.num_tokens, self.hidden_size) if wants_output and has_shared else None,
            gathered_x=self.ring(self.width, self.most_blocks, self.hidden_size),
        )

    def forward(
        self,
        ranks: ops.Ranks,
        buffers: ops.ForwardBuffers,
        parts: ops.Parts,
        router_weights: Tensor | None = None,
        with_shared: bool = True,
    ) -> None:
        ops.forward(
            self.launch,
            ranks,
            self.schedule.tables(),
            self.counters,
            self.x,
            router_weights,
            self.shared if with_shared else None,
            self.routed,
            self.swiglu_limit,
            buffers,
            parts,
        )


def _goes_to_torch(workspace: MoKWorkspace, x: Tensor, weights: ExpertWeights) -> bool:
    """Whether the kernels can not read this; an error if the config asks for them."""
    problem = _kernel_problem(x, weights)
    if problem is not None and workspace.config.backend is not None:
        raise ValueError(problem)
    return problem is not None


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
    if _goes_to_torch(workspace, x, weights):
        view = _TorchView(workspace, schedule)
        return torch_backend.recompute_forward_context(workspace, view.schedule, x, weights, swiglu_limit)
    call = _Call(workspace, schedule, x, weights, swiglu_limit)
    buffers = call.forward_buffers(None, _kept_rows(workspace, schedule), True)
    call.run(lambda parts: call.forward(_ranks(workspace), buffers, parts))
    return _context(x, buffers)


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
    if _goes_to_torch(workspace, x, weights):
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
    call = _BackwardCall(workspace, schedule, x, weights, swiglu_limit)
    return call.backward(context, grad_output, router_weights, main_grads, needs_grad)


class _Targets:
    """Where the three weight gradients of a segment go: new tensors, or main_grads."""

    def __init__(self, mlp: ops.Mlp, main_grads: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> None:
        gate, like = mlp[0], cast(tuple[Tensor, Tensor, Tensor], mlp)
        self.new: list[Tensor | None] = [None] * 3
        if needs_grad[0] and needs_grad[1] and main_grads[0] is None and main_grads[1] is None:
            joined = gate.new_empty(*gate.shape[:-2], 2 * gate.shape[-2], gate.shape[-1])
            self.new[:2] = joined.chunk(2, dim=-2)
        self.main_grads = main_grads
        self.targets: list[ops.WeightGradient | None] = [None] * 3
        for i in range(3):
            main_grad = main_grads[i]
            if not needs_grad[i]:
                continue
            if main_grad is None:
                new = self.new[i] = like[i].new_empty(like[i].shape) if self.new[i] is None else self.new[i]
                self.targets[i] = ops.WeightGradient(cast(Tensor, new), add=False)
                continue
            target = ops.WeightGradient(main_grad, add=True)
            if not target.can_be_written():
                target = ops.WeightGradient(torch.zeros_like(main_grad, dtype=torch.float32).contiguous(), add=True)
            self.targets[i] = target

    def set_zero(self) -> None:
        for new in self.new:
            if new is not None:
                new.zero_()

    def results(self) -> list[Tensor | None]:
        for target, main_grad in zip(self.targets, self.main_grads, strict=True):
            if target is not None and main_grad is not None and target.data is not main_grad:
                main_grad.add_(target.data)
        return self.new


class _Blocks(NamedTuple):
    """The routed blocks of one backward launch."""

    first: int
    size: int
    is_kept: bool  # forward has kept their gate and up


class _BackwardCall(_Call):
    def backward(
        self,
        context: MoKForwardContext,
        grad_output: Tensor,
        router_weights: Tensor,
        main_grads: MainGrads,
        needs: NeedsGrad,
    ) -> MoKGradients:
        self.needs, self.context, self.grad_output = needs, context, grad_output
        self.needs_routed = needs.x or needs.router_weights or any(needs[2:5])
        self.needs_shared = self.shared is not None and (needs.x or any(needs[5:]))
        routed = _Targets(self.routed, main_grads[3:], needs[2:5])
        shared = _Targets(self.shared, main_grads[:3], needs[5:]) if self.shared is not None else None
        d_x = torch.empty_like(self.x) if needs.x else None
        d_router_weights = torch.zeros_like(router_weights) if needs.router_weights else None
        if self.most_blocks == 0:  # no rank has tokens
            for targets in (routed, shared):
                if targets is not None:
                    targets.set_zero()
        elif self.needs_routed or self.needs_shared:
            if shared is not None and self.num_tokens == 0:
                shared.set_zero()
            self._run(router_weights.contiguous(), d_x, d_router_weights, routed.targets, shared)
        shared_results = [None] * 3 if shared is None else shared.results()
        return MoKGradients(d_x, d_router_weights, *routed.results(), *shared_results)

    def _run(
        self,
        router_weights: Tensor,
        d_x: Tensor | None,
        d_router_weights: Tensor | None,
        routed: Sequence[ops.WeightGradient | None],
        shared: _Targets | None,
    ) -> None:
        peers: PeerMemory | None = self.workspace.buffers.peers
        routes = router_weights.numel()
        route_output = self.empty(routes, self.hidden_size) if peers is None and d_x is not None else None
        if peers is not None:
            peers.own("router_weights", torch.float32)[:routes] = router_weights.flatten()
            peers.own("d_router_weights", torch.float32)[:routes].zero_()
        exchanges = peers is not None and self.needs_routed
        ranks = _ranks(self.workspace, route_output, router_weights, d_router_weights)
        if not exchanges:
            ranks = replace(ranks, device_barriers=False)
        launches = self._plan()
        recomputes = not all(blocks.is_kept for blocks in launches)
        rows = max(blocks.size for blocks in launches) * ops.BLOCK_ROWS
        buffers = ops.BackwardBuffers(
            d_x=d_x,
            shared_d_x=self.empty(*self.x.shape) if d_x is not None and self.shared is not None else None,
            d_output_rows=self.empty(rows, self.hidden_size) if self.needs_routed else None,
            # What is recomputed needs the peers' x, too.
            x_rows=self.empty(rows, self.hidden_size) if any(self.needs[2:4]) or recomputes else None,
            zero_row=self.workspace.buffers.zero_row,
            accumulators=(None, None),
        )
        routed_gradients = self._gradients(
            self.context.gate_up, self.width, rows, self.needs[2:5], routed, self.needs.router_weights
        )
        shared_gradients = None
        if self.needs_shared and shared is not None:
            shared_gradients = self._gradients(
                self.context.shared_gate_up, self.shared_width, self.num_tokens, self.needs[5:], shared.targets, False
            )
        scratch = replace(self.forward_buffers(None, rows, True), gate_up_in_blocks=True) if recomputes else None
        accumulators = [self._accumulators() if len(launches) > i + 1 else None for i in range(2)]

        def launch(index: int, parts: ops.Parts) -> None:
            blocks = launches[index]
            is_first, is_last = index == 0, index == len(launches) - 1
            parts = replace(parts, first_block=blocks.first, most_blocks=blocks.size)
            gradients = routed_gradients
            if parts.gemm and not blocks.is_kept and scratch is not None and scratch.gate_up is not None:
                self.forward(ranks, scratch, replace(parts, publish=False, combine=False), with_shared=False)
                gradients = replace(gradients, gate_up=scratch.gate_up, gate_up_in_blocks=True)
            ops.backward(
                self.launch,
                ranks,
                self.schedule.tables(),
                self.counters,
                self.grad_output,
                self.x,
                self.shared,
                self.routed,
                self.swiglu_limit,
                shared_gradients if is_first else None,
                gradients if self.needs_routed else None,
                replace(
                    buffers,
                    accumulators=(
                        None if is_first else accumulators[(index - 1) % 2],
                        None if is_last else accumulators[index % 2],
                    ),
                ),
                parts,
            )

        if self.has_device_barriers:
            # The launch that publishes is one of backward, for only it knows both streams.
            separate = exchanges and not launches[0].is_kept
            if separate:
                launch(0, ops.Parts(publish=True, gemm=False, combine=False))
            for index in range(len(launches)):
                publish = exchanges and index == 0 and not separate
                combine = index == len(launches) - 1 and self.needs_routed
                by_row = combine and peers is None and len(launches) == 1
                launch(index, ops.Parts(publish, True, combine, combine_by_row=by_row))
        else:
            if exchanges:
                launch(0, ops.Parts(publish=True, gemm=False, combine=False))
                self.workspace.communicator.barrier()
            for index in range(len(launches)):
                launch(index, ops.Parts(publish=False, gemm=True, combine=False))
            if exchanges:
                self.workspace.communicator.barrier()
                launch(len(launches) - 1, ops.Parts(publish=False, gemm=False, combine=True))
                self.workspace.communicator.barrier()
        if peers is not None and d_router_weights is not None:
            d_router_weights.copy_(peers.own("d_router_weights", torch.float32)[:routes].view_as(d_router_weights))

    def _plan(self) -> list[_Blocks]:
        """Launches over all blocks, each of as many rows as forward keeps; those that it kept come first."""
        if not self.needs_routed:
            return [_Blocks(0, 0, True)]
        kept_rows = self.context.gate_up.shape[0]
        kept_all = kept_rows >= self.schedule.row_route.numel()
        kept = self.most_blocks if kept_all else min(kept_rows // ops.BLOCK_ROWS, self.most_blocks)
        macrobatch = self.workspace.config.macrobatch_size or kept_rows
        step = max(macrobatch // ops.BLOCK_ROWS, 1)
        if kept_all and self.workspace.config.macrobatch_size is None:
            step = self.most_blocks
        return [
            _Blocks(first, min(step, end - first), is_kept)
            for begin, end, is_kept in ((0, kept, True), (kept, self.most_blocks, False))
            for first in range(begin, end, step)
        ]

    def _gradients(
        self,
        gate_up: Tensor,
        width: int,
        rows: int,
        needs_grad: Sequence[bool],
        targets: Sequence[ops.WeightGradient | None],
        needs_parts: bool,
    ) -> ops.SegmentGradients:
        needs_d_gate_up = self.needs.x or any(needs_grad[:2])
        return ops.SegmentGradients(
            gate_up=gate_up,
            gate_up_in_blocks=False,
            d_gate_up=self.empty(rows, 2 * width) if needs_d_gate_up else None,
            activation=self.empty(rows, width) if needs_grad[2] else None,
            d_weight_parts=self.empty(rows, ops.column_tiles(width), dtype=torch.float32) if needs_parts else None,
            gate=targets[0],
            up=targets[1],
            down=targets[2],
        )

    def _accumulators(self) -> Tensor | None:
        """Room for one expert's weight gradients between two launches."""
        if not any(self.needs[2:5]):
            return None
        return self.empty(ops.accumulator_floats(self.hidden_size, self.width), dtype=torch.float32)
