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
    1: "a tile waited for the first GEMM of row block {task}",
    2: "a tile waited for its place in the activation ring, held by row block {task}",
    3: "a tile waited for the gathered rows of block {task}",
    4: "a token waited for the second GEMM of row block {task}",
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

    def fill(self, params: _C.ScheduleParams | _C.MoeParams) -> None:
        params.error = self.error.memory.data_ptr()
        params.timeout_ns = int(self.timeout_s * 1e9)


# Behind the counters of the persistent kernel: the schedule kernel's grid barrier (two) and error claims.
NUM_COUNTERS = _C.COUNTER_BYTES // 4 + 3


@dataclass(frozen=True)
class Ranks:
    """The expert-parallel group as the kernels see it; pointers are of every rank's buffers, in rank order."""

    rank: int
    size: int
    token_capacity: int
    ids: list[int]  # int32 [size, token_capacity * K]
    published_x: list[int]  # bf16 [token_capacity, H]
    published_d_output: list[int]  # the same of the output's gradient
    route_output: list[int]  # bf16 [token_capacity * K, H]
    router_weights: list[int]  # float32 [token_capacity * K]
    d_router_weights: list[int]  # float32 [token_capacity * K]
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
    expert_blocks: Tensor


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
    p.expert_blocks = tables.expert_blocks.data_ptr()
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


def ring_blocks(hidden_size: int, intermediate_size: int, sms: int) -> int:
    """Row blocks that the activation ring of a forward has."""
    return _C.plan_forward(hidden_size, intermediate_size, sms).ring_blocks


# Gate, up and down of some MLPs: each [experts, rows, columns], or [rows, columns] of one. Down is None where only gate
# and up are computed.
Mlp = tuple[Tensor, Tensor, Tensor | None]


def _view(weight: Tensor) -> _C.MatrixView:
    stacked = weight if weight.dim() == 3 else weight[None]
    return _C.MatrixView(stacked.data_ptr(), stacked.stride(0), stacked.stride(1))


def _mlp(gate: Tensor, up: Tensor, down: Tensor | None) -> _C.MlpWeights:
    weights = _C.MlpWeights()
    weights.gate, weights.up = _view(gate), _view(up)
    if down is not None:
        weights.down = _view(down)
    weights.num_experts = gate.shape[0] if gate.dim() == 3 else 1
    weights.intermediate = gate.shape[-2]
    return weights


@dataclass(frozen=True)
class BlockCounters:
    """int32, zero before the first launch: four counters a routed block, two a shared one."""

    all: Tensor
    first: Tensor
    second: Tensor
    gathered: Tensor
    gathered_x: Tensor
    shared_first: Tensor
    shared_second: Tensor

    @staticmethod
    def new(num_blocks: int, num_shared_blocks: int, device: torch.device) -> BlockCounters:
        sizes = (num_blocks,) * 4 + (num_shared_blocks,) * 2
        everything = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        return BlockCounters(everything, *everything.split(sizes))


@dataclass(frozen=True)
class Parts:
    """What a launch does: tokens to symmetric memory, the GEMMs with their pulls and pushes, the sum over a token's
    routes. The GEMMs are those of the routed blocks [first_block, first_block + most_blocks), as far as they exist.
    combine_by_row: each token as soon as its rows are done, which takes one rank and one launch for all blocks."""

    publish: bool
    gemm: bool
    combine: bool
    first_block: int = 0
    most_blocks: int = 2**31 - 1 - 2**16
    combine_by_row: bool = False


def _fill(
    p: _C.MoeParams,
    launch: Launch,
    ranks: Ranks,
    tables: ScheduleTables,
    counters: BlockCounters,
    x: Tensor,
    swiglu_limit: float | None,
    parts: Parts,
) -> None:
    launch.fill(p)
    p.num_tokens, p.hidden = x.shape
    p.top_k = tables.route_row.shape[1]
    p.token_capacity = ranks.token_capacity
    p.rank, p.world_size = ranks.rank, ranks.size
    p.num_routed_blocks = tables.num_blocks.data_ptr()
    p.blocks = tables.blocks[parts.first_block :].data_ptr()
    p.first_block, p.most_blocks = parts.first_block, parts.most_blocks
    p.row_route, p.route_row = tables.row_route.data_ptr(), tables.route_row.data_ptr()
    p.route_output, p.flags = ranks.route_output, ranks.flags
    p.counters = launch.counters.data_ptr()
    p.block_counters, p.num_block_counters = counters.all.data_ptr(), counters.all.numel()
    p.swiglu_limit = float("inf") if swiglu_limit is None else swiglu_limit
    p.publish, p.gemm, p.combine = parts.publish, parts.gemm, parts.combine
    p.combine_by_row = parts.combine_by_row
    p.device_barriers = ranks.device_barriers
    p.routed.first_done, p.routed.second_done = counters.first.data_ptr(), counters.second.data_ptr()
    p.shared.first_done = counters.shared_first.data_ptr()
    p.shared.second_done = counters.shared_second.data_ptr()


@dataclass(frozen=True)
class ForwardBuffers:
    """Outputs and scratch of a forward; None where the segment does not exist or nobody wants it. Without output and
    activations only gate and up are computed.

    gate_up has the rows of the schedule, or those of the launch's blocks (BLOCK_ROWS each) if `gate_up_in_blocks`.
    """

    output: Tensor | None  # bf16 [T, H]
    activation: Tensor | None  # bf16 [ring_blocks * BLOCK_ROWS, I]
    gate_up: Tensor | None  # bf16 [rows, 2I]
    shared_activation: Tensor | None
    shared_gate_up: Tensor | None  # bf16 [T, 2*I_s]
    shared_output: Tensor | None  # bf16 [T, H]
    gathered_x: Tensor  # bf16 [ring_blocks * BLOCK_ROWS, H]
    gate_up_in_blocks: bool = False


def forward(
    launch: Launch,
    ranks: Ranks,
    tables: ScheduleTables,
    counters: BlockCounters,
    x: Tensor,
    router_weights: Tensor | None,
    shared: Mlp | None,
    routed: Mlp,
    swiglu_limit: float | None,
    buffers: ForwardBuffers,
    parts: Parts,
) -> None:
    """`parts` of a forward. router_weights: not needed without an output."""
    p = _C.ForwardParams()
    _fill(p, launch, ranks, tables, counters, x, swiglu_limit, parts)
    p.route_weights, p.output = _pointer(router_weights), _pointer(buffers.output)
    p.num_streams = 1
    _fill_stream(p.first_stream, x, ranks.published_x, buffers.gathered_x, counters.gathered)
    p.routed.activation = _pointer(buffers.activation)
    p.routed.gate_up = _pointer(buffers.gate_up)
    p.routed.gate_up_rows = 0 if buffers.gate_up is None else buffers.gate_up.shape[0]
    p.routed.gate_up_in_blocks = buffers.gate_up_in_blocks
    if shared is not None:
        p.shared_output = _pointer(buffers.shared_output)
        p.shared.activation = _pointer(buffers.shared_activation)
        p.shared.gate_up = _pointer(buffers.shared_gate_up)
        p.shared.gate_up_rows = x.shape[0]
    _C.launch_forward(p, _C.MlpWeights() if shared is None else _mlp(*shared), _mlp(*routed), launch.settings())


@dataclass(frozen=True)
class WeightGradient:
    """Where the gradient of a weight goes: bf16 or fp32 `[experts, rows, columns]` (or `[rows, columns]` of one),
    columns contiguous, pairs of columns aligned. add: to what is there, else bf16 that is overwritten."""

    data: Tensor
    add: bool

    def can_be_written(self) -> bool:
        """Whether the kernel can address it, two columns at a time."""
        data = self.data
        is_aligned = data.data_ptr() % (2 * data.element_size()) == 0 and not any(s % 2 for s in data.stride()[:-1])
        return data.dtype in (torch.bfloat16, torch.float32) and data.stride(-1) == 1 and is_aligned

    def struct(self) -> _C.WeightGradient:
        result = _C.WeightGradient()
        view = self.data if self.data.dim() == 3 else self.data[None]
        result.data = view.data_ptr()
        result.expert_stride, result.row_stride = view.stride(0), view.stride(1)
        is_float = self.data.dtype == torch.float32
        result.mode = (_C.ADD_FLOAT if is_float else _C.ADD_BF16) if self.add else _C.WRITE_BF16
        return result


@dataclass(frozen=True)
class SegmentGradients:
    """What backward reads and writes for the routed experts or the shared one; None: not wanted.

    Routed buffers have BLOCK_ROWS rows for each block of the launch, those of the shared expert T.
    """

    gate_up: Tensor  # bf16 [rows, 2I], as forward saved it
    gate_up_in_blocks: bool
    d_gate_up: Tensor | None  # bf16 [rows, 2I]
    activation: Tensor | None  # bf16 [rows, I]
    d_weight_parts: Tensor | None  # float32 [rows, column tiles of I]
    gate: WeightGradient | None
    up: WeightGradient | None
    down: WeightGradient | None

    def fill(self, segment: _C.SegmentParams, gradients: _C.SegmentGradients) -> None:
        segment.gate_up, segment.gate_up_in_blocks = self.gate_up.data_ptr(), self.gate_up_in_blocks
        gradients.d_gate_up = _pointer(self.d_gate_up)
        gradients.activation = _pointer(self.activation)
        gradients.d_weight_parts = _pointer(self.d_weight_parts)
        for name in ("gate", "up", "down"):
            target: WeightGradient | None = getattr(self, name)
            if target is not None:
                setattr(gradients, name, target.struct())


def column_tiles(columns: int) -> int:
    """Tiles of a GEMM's result with so many columns."""
    return -(-columns // _C.TILE_COLUMNS)


def accumulator_floats(hidden_size: int, intermediate_size: int) -> int:
    """Room for the weight gradients of an expert that two launches share."""
    gate_up = -(-intermediate_size // _C.TILE_ROWS) * column_tiles(hidden_size)
    down = -(-hidden_size // BLOCK_ROWS) * column_tiles(intermediate_size)
    return (gate_up + down) * _C.CLUSTER_SIZE * _C.TILE_ROWS * _C.TILE_COLUMNS


@dataclass(frozen=True)
class BackwardBuffers:
    """Outputs and scratch of a backward; None where nobody wants it."""

    d_x: Tensor | None  # bf16 [T, H]
    shared_d_x: Tensor | None  # bf16 [T, H]
    d_output_rows: Tensor | None  # bf16 [rows, H]
    x_rows: Tensor | None  # bf16 [rows, H]
    zero_row: Tensor  # bf16 [H]
    accumulators: tuple[Tensor | None, Tensor | None]  # float32, of the launch before and for the next


def backward(
    launch: Launch,
    ranks: Ranks,
    tables: ScheduleTables,
    counters: BlockCounters,
    d_output: Tensor,
    x: Tensor,
    shared: Mlp | None,
    routed: Mlp,
    swiglu_limit: float | None,
    shared_gradients: SegmentGradients | None,
    routed_gradients: SegmentGradients | None,
    buffers: BackwardBuffers,
    parts: Parts,
) -> None:
    """`parts` of a backward; a segment without gradients is left out."""
    p = _C.BackwardParams()
    _fill(p, launch, ranks, tables, counters, x, swiglu_limit, parts)
    p.num_local_experts, p.expert_blocks = tables.expert_offsets.numel() - 1, tables.expert_blocks.data_ptr()
    p.router_weights, p.d_router_weights = ranks.router_weights, ranks.d_router_weights
    p.needs_d_x = buffers.d_x is not None
    p.output, p.shared_output = _pointer(buffers.d_x), _pointer(buffers.shared_d_x)
    p.zero_row = buffers.zero_row.data_ptr()
    p.accumulators_in, p.accumulators_out = map(_pointer, buffers.accumulators)
    p.num_streams = 1 if buffers.x_rows is None else 2
    published = ranks.published_d_output
    _fill_stream(p.first_stream, d_output, published, buffers.d_output_rows, counters.gathered)
    _fill_stream(p.second_stream, x, ranks.published_x, buffers.x_rows, counters.gathered_x)
    if routed_gradients is None:
        p.most_blocks = 0
    else:
        routed_gradients.fill(p.routed, p.routed_gradients)
    if shared_gradients is None:
        shared = None
    else:
        shared_gradients.fill(p.shared, p.shared_gradients)
    _C.launch_backward(p, _C.MlpWeights() if shared is None else _mlp(*shared), _mlp(*routed), launch.settings())


def _fill_stream(
    stream: _C.TokenStream, tokens: Tensor, published: list[int], rows: Tensor | None, gathered: Tensor
) -> None:
    stream.tokens, stream.published = tokens.data_ptr(), published
    stream.rows, stream.gathered = _pointer(rows), gathered.data_ptr()


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
