// activation = silu(x W_gate^T) * (x W_up^T): one tile holds 128 gate columns and the 128 matching up columns.
#pragma once

#include <cuda.h>

#include "../../device/epilogue/swiglu.cuh"
#include "readiness.cuh"

namespace mok {

struct TensorMaps {
    CUtensorMap gate[2];  // by segment, each [experts, rows, depth]
    CUtensorMap up[2];
    CUtensorMap down[2];
};

struct WeightHalf {
    CUtensorMap const* map;
    int row;
};

struct GateUp {
    static __device__ __forceinline__ int column_tiles(ForwardParams const& p, Task const& task) {
        return p.segments[task.segment].gate_up_tiles;
    }
    static __device__ __forceinline__ int depth(ForwardParams const& p, Task const&) { return p.hidden; }

    static __device__ __forceinline__ void wait_ready(ForwardParams const& p, Task const& task, Readiness& readiness,
                                                      WaitReport const& report) {
        SegmentParams const& segment = p.segments[task.segment];
        int const previous = task.block - segment.ring_blocks;
        if (previous >= 0) {
            wait_at_least(&segment.down_done[previous],
                          stores_of_block(rows_of_block(p, task.segment, previous), segment.down_tiles), kRingTimeout,
                          previous, report);
        }
        if (task.segment == kRoutedSegment && p.world_size > 1) readiness.wait_landed(p, task.block, report);
    }

    static __device__ __forceinline__ bf16 const* input_row(ForwardParams const& p, Task const& task, int block_row) {
        int const row = task.first_row + block_row;
        if (task.segment != kRoutedSegment) return p.x + int64_t{row} * p.hidden;
        int const token = p.row_route[row] / p.top_k;  // source_rank * token_capacity + token
        int const own = token - p.rank * p.token_capacity;
        bool const is_own = own >= 0 && own < p.token_capacity;
        return is_own ? p.x + int64_t{own} * p.hidden : p.landing + int64_t{token} * p.hidden;
    }
    static __device__ __forceinline__ bf16 const* any_address(ForwardParams const& p, Task const&) { return p.x; }

    static __device__ __forceinline__ WeightHalf weight_half(TensorMaps const& maps, int segment, int column,
                                                             int half) {
        return {half == 0 ? &maps.gate[segment] : &maps.up[segment], column * kGateUpColumns};
    }

    static __device__ __forceinline__ int row_info(ForwardParams const&, Task const&, int) { return 0; }

    static __device__ __forceinline__ void store(ForwardParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 int) {
        SegmentParams const& segment = p.segments[task.segment];
        int const first_column = tile.column * kGateUpColumns;
        int const num_columns = segment.intermediate - first_column;
        constexpr int kPairs = kAccumulators / 4;  // bf16 pairs of gate, and as many of up
        uint32_t gate[kPairs], up[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            gate[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
            up[i] = pack_bf16(acc[2 * (kPairs + i)], acc[2 * (kPairs + i) + 1]);
        }
        if (segment.gate_up != nullptr) {
            int64_t const row_begin = int64_t{task.first_row} + tile.block_row + warp_row;
            bf16* const saved = segment.gate_up + row_begin * 2 * segment.intermediate + first_column;
            auto const saved_row = [&](int row) -> bf16* {
                bool const is_kept = warp_row + row < tile.num_rows && row_begin + row < segment.gate_up_rows;
                return is_kept ? saved + int64_t{row} * 2 * segment.intermediate : nullptr;
            };
            store_strip(staging, gate, num_columns, saved_row);
            store_strip(staging, up, num_columns, [&](int row) {
                bf16* const pointer = saved_row(row);
                return pointer == nullptr ? nullptr : pointer + segment.intermediate;
            });
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i) gate[i] = swiglu_bf16(gate[i], up[i], p.swiglu_limit);
        bf16* const activation = activation_row(segment, task.block, tile.block_row + warp_row) + first_column;
        store_strip(staging, gate, num_columns, [&](int row) {
            return warp_row + row < tile.num_rows ? activation + int64_t{row} * segment.intermediate : nullptr;
        });
    }

    static __device__ __forceinline__ void signal(ForwardParams const& p, Task const& task) {
        ptx::red_release_gpu_add(&p.segments[task.segment].gate_up_done[task.block], 1);
    }
};

}  // namespace mok
