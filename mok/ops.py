"""The compiled kernels as functions of tensors; the only module that imports `mok._C`.

Nothing here waits for the GPU or checks meaning (`mok.functional` does); a kernel that gives up a wait writes an error
record to pinned memory, which `ErrorRecord` turns into an exception.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from mok import _C  # type: ignore[attr-defined]

BLOCK_ROWS: int = _C.BLOCK_ROWS
MAX_RANKS: int = _C.MAX_RANKS
ARCHITECTURES: tuple[str, ...] = tuple(_C.ARCHITECTURES.split(","))

_ERRORS = {
    1: "a down tile waited for the gate+up tiles of row block {task}",
    2: "a gate+up tile waited for its place in the activation ring, held by row block {task}",
    3: "a gate+up tile waited for the gathered rows of block {task}",
    4: "a token waited for the down tiles of row block {task}",
    5: "rank {rank} waited for rank {task}",
    6: "a wait inside one thread block did not end",
    7: "the schedule kernel waited for its own thread blocks",
    8: "schedule_capacity_multiplier: expected at most {expected} routed rows on rank {rank}, got {seen}",
    9: "top_experts: expected ids from -1 (dropped) to {expected}; token {task} has another",
}


class ErrorRecord:
    """Pinned memory where a kernel that gives up a wait says why. `counters` is that of the launches."""

    def __init__(self, memory: Tensor, counters: Tensor) -> None:
        self.memory, self.counters = memory, counters
        self._bytes = memory.numpy()  # a view; reading it does not wait for the GPU

    def raise_error(self) -> None:
        """Raise what a kernel has reported, once.

        ValueError for bad input that only the GPU could see, RuntimeError for a wait that ran out of time; naming rank,
        who is waited for, the expected and the seen value.
        """
        if not self._bytes[0]:
            return
        code, rank, cta, task, expected, seen = struct.unpack("<iiiiqq", self._bytes.tobytes())
        self.memory.zero_()
        self.counters[-1] = 0
        message = _ERRORS[code].format(rank=rank, task=task, expected=expected, seen=seen)
        if code >= 8:
            raise ValueError(message)
        raise RuntimeError(
            f"mok kernel timed out on rank {rank}, thread block {cta}: {message} (expected {expected}, saw {seen}); "
            f"MoKConfig.timeout_s sets the limit"
        )


def new_error_memory() -> Tensor:
    return torch.zeros(_C.ERROR_RECORD_BYTES, dtype=torch.uint8, pin_memory=True)


def num_sms(device: torch.device) -> int:
    return _C.device_num_sms(device.index)


@dataclass(frozen=True)
class Launch:
    """What every launch needs.

    num_sms: SMs to use, 0 = all. counters: int32 `[NUM_COUNTERS]`, zero before the first launch.
    """

    device: torch.device
    num_sms: int
    timeout_s: float
    error: ErrorRecord
    counters: Tensor

    def settings(self) -> _C.LaunchSettings:
        settings = _C.LaunchSettings()
        settings.device = self.device.index
        settings.stream = torch.cuda.current_stream(self.device).cuda_stream
        settings.num_sms = self.num_sms
        return settings

    def fill(self, params: _C.ScheduleParams | _C.ForwardParams) -> None:
        params.error = self.error.memory.data_ptr()
        params.timeout_ns = int(self.timeout_s * 1e9)


# Behind the counters of the forward kernel: the schedule kernel's grid barrier (two) and error claims.
NUM_COUNTERS = _C.COUNTER_BYTES // 4 + 3


@dataclass(frozen=True)
class Ranks:
    """The expert-parallel group as the kernels see it; pointers are of every rank's buffers, in rank order."""

    rank: int
    size: int
    token_capacity: int
    ids: list[int]  # int32 [size, token_capacity * K]
    published_x: list[int]  # bf16 [token_capacity, H]
    route_output: list[int]  # bf16 [token_capacity * K, H]
    flags: list[int]  # uint32 [size]
    device_barriers: bool  # ranks meet inside the kernel; otherwise on the host, between its three parts


@dataclass(frozen=True)
class ScheduleTables:
    """Outputs of the schedule kernel; shapes as in `MoKSchedule` and `CudaSchedule`."""

    expert_offsets: Tensor
    row_route: Tensor
    route_row: Tensor
    route_rank: Tensor
    blocks: Tensor
    num_blocks: Tensor


def schedule(
    launch: Launch,
    ranks: Ranks,
    top_experts: Tensor,
    num_local_experts: int,
    tables: ScheduleTables,
    *,
    publish: bool,
    sort: bool,
) -> None:
    """Write this rank's ids to its peers (`publish`), and build the tables from the ids of all ranks (`sort`)."""
    p = _C.ScheduleParams()
    launch.fill(p)
    p.top_experts = top_experts.data_ptr()
    p.id_bytes = top_experts.element_size()
    p.num_tokens, p.top_k = top_experts.shape
    p.token_capacity = ranks.token_capacity
    p.num_local_experts = num_local_experts
    p.num_experts = num_local_experts * ranks.size
    p.rank, p.world_size = ranks.rank, ranks.size
    p.row_capacity = tables.row_route.numel()
    p.gathered_ids = ranks.ids
    p.expert_offsets = tables.expert_offsets.data_ptr()
    p.row_route = tables.row_route.data_ptr()
    p.route_row = tables.route_row.data_ptr()
    p.route_rank = tables.route_rank.data_ptr()
    p.blocks = tables.blocks.data_ptr()
    p.max_blocks = tables.blocks.shape[0]
    p.num_blocks = tables.num_blocks.data_ptr()
    num_routes = ranks.size * ranks.token_capacity * p.top_k
    grid = _C.plan_schedule_grid(num_routes, num_sms(launch.device))
    counts = torch.empty(grid * p.num_experts, dtype=torch.int32, device=launch.device)
    p.segment_counts = counts.data_ptr()
    p.grid_barrier = launch.counters.data_ptr() + _C.COUNTER_BYTES
    p.error_claims = p.grid_barrier + 8
    p.publish, p.sort = publish, sort
    _C.launch_schedule(p, launch.settings())


def max_blocks(row_capacity: int, num_experts: int) -> int:
    """Row blocks that `row_capacity` rows of `num_experts` experts can take."""
    return min(row_capacity, row_capacity // BLOCK_ROWS + num_experts)


def segment_plan(hidden_size: int, intermediate_size: int, sms: int) -> _C.SegmentPlan:
    """How the tiles of one group of MLPs are ordered, and how many blocks its activation ring has."""
    return _C.plan_segment(hidden_size, intermediate_size, sms)


# Gate, up and down of some MLPs: each [experts, rows, columns], or [rows, columns] of one.
Mlp = tuple[Tensor, Tensor, Tensor]


def _view(weight: Tensor) -> _C.MatrixView:
    stacked = weight if weight.dim() == 3 else weight[None]
    return _C.MatrixView(stacked.data_ptr(), stacked.stride(0), stacked.stride(1))


def _mlp(gate: Tensor, up: Tensor, down: Tensor) -> _C.MlpWeights:
    weights = _C.MlpWeights()
    weights.gate, weights.up, weights.down = _view(gate), _view(up), _view(down)
    weights.num_experts = gate.shape[0] if gate.dim() == 3 else 1
    weights.intermediate = gate.shape[-2]
    return weights


@dataclass(frozen=True)
class BlockCounters:
    """int32, zero before the first launch: three counters a routed block, two a shared one."""

    all: Tensor
    gate_up: Tensor
    down: Tensor
    gathered: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor

    @staticmethod
    def new(num_blocks: int, num_shared_blocks: int, device: torch.device) -> BlockCounters:
        sizes = (num_blocks, num_blocks, num_blocks, num_shared_blocks, num_shared_blocks)
        everything = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        return BlockCounters(everything, *everything.split(sizes))


@dataclass(frozen=True)
class ForwardBuffers:
    """Outputs and scratch of a forward; None where the segment does not exist or is not kept."""

    output: Tensor  # bf16 [T, H]
    activation: Tensor  # bf16 [ring_blocks * BLOCK_ROWS, I]
    gate_up: Tensor | None  # bf16 [rows, 2I]
    shared_activation: Tensor | None
    shared_gate_up: Tensor | None  # bf16 [T, 2*I_s]
    shared_output: Tensor | None  # bf16 [T, H]
    gathered_x: Tensor  # bf16 [ring_blocks * BLOCK_ROWS, H]


def forward(
    launch: Launch,
    ranks: Ranks,
    tables: ScheduleTables,
    counters: BlockCounters,
    x: Tensor,
    router_weights: Tensor,
    shared: Mlp | None,
    routed: Mlp,
    swiglu_limit: float | None,
    buffers: ForwardBuffers,
    *,
    publish: bool,
    gemm: bool,
    combine: bool,
) -> None:
    """Any of the three parts of forward: x to symmetric memory, the GEMMs with their pulls and pushes, the sum."""
    p = _C.ForwardParams()
    launch.fill(p)
    p.num_tokens, p.hidden = x.shape
    p.top_k = router_weights.shape[1]
    p.token_capacity = ranks.token_capacity
    p.rank, p.world_size = ranks.rank, ranks.size
    p.num_routed_blocks = tables.num_blocks.data_ptr()
    p.blocks = tables.blocks.data_ptr()
    p.row_route, p.route_row = tables.row_route.data_ptr(), tables.route_row.data_ptr()
    p.router_weights, p.x, p.output = router_weights.data_ptr(), x.data_ptr(), buffers.output.data_ptr()
    p.route_output, p.published_x, p.flags = ranks.route_output, ranks.published_x, ranks.flags
    p.gathered_x = buffers.gathered_x.data_ptr()
    p.gathered = counters.gathered.data_ptr()
    p.counters = launch.counters.data_ptr()
    p.block_counters, p.num_block_counters = counters.all.data_ptr(), counters.all.numel()
    p.swiglu_limit = float("inf") if swiglu_limit is None else swiglu_limit
    p.publish, p.gemm, p.combine = publish, gemm, combine
    p.device_barriers = ranks.device_barriers
    p.routed.activation = buffers.activation.data_ptr()
    p.routed.gate_up = _pointer(buffers.gate_up)
    p.routed.gate_up_rows = 0 if buffers.gate_up is None else buffers.gate_up.shape[0]
    p.routed.gate_up_done, p.routed.down_done = counters.gate_up.data_ptr(), counters.down.data_ptr()
    if shared is not None:
        p.shared_output = _pointer(buffers.shared_output)
        p.shared.activation = _pointer(buffers.shared_activation)
        p.shared.gate_up = _pointer(buffers.shared_gate_up)
        p.shared.gate_up_rows = x.shape[0]
        p.shared.gate_up_done, p.shared.down_done = (
            counters.shared_gate_up.data_ptr(),
            counters.shared_down.data_ptr(),
        )
    _C.launch_forward(p, _C.MlpWeights() if shared is None else _mlp(*shared), _mlp(*routed), launch.settings())


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
