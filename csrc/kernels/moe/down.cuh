// route_output = activation W_down^T, pushed to the slot of the route on the rank that owns the token.
#pragma once

#include "gate_up.cuh"

namespace mok {

struct Down {
    static __device__ __forceinline__ int column_tiles(ForwardParams const& p, Task const& task) {
        return p.segments[task.segment].down_tiles;
    }
    static __device__ __forceinline__ int depth(ForwardParams const& p, Task const& task) {
        return p.segments[task.segment].intermediate;
    }

    static __device__ __forceinline__ void wait_ready(ForwardParams const& p, Task const& task,
                                                      WaitReport const& report) {
        SegmentParams const& segment = p.segments[task.segment];
        poll_at_least(&segment.gate_up_done[task.block], stores_of_block(task.num_rows, segment.gate_up_tiles),
                      kGateUpTimeout, task.block, report);
    }

    static __device__ __forceinline__ CUtensorMap const* input_map(TensorMaps const& maps, int segment) {
        return &maps.activation[segment];
    }
    static __device__ __forceinline__ int input_row(Task const& task) { return task.ring_row; }

    static __device__ __forceinline__ WeightHalf weight_half(TensorMaps const& maps, int segment, int column,
                                                             int half) {
        return {&maps.down[segment], column * kTileColumns + half * (kTileColumns / 2)};
    }

    // The row's route, or its token in the shared segment.
    static __device__ __forceinline__ int row_info(ForwardParams const& p, Task const& task, int block_row) {
        int const row = task.first_row + block_row;
        return task.segment == kRoutedSegment ? p.row_route[row] : row;
    }

    static __device__ __forceinline__ bf16* output_row(ForwardParams const& p, int segment, int row_info) {
        if (segment != kRoutedSegment) return p.shared_output + int64_t{row_info} * p.hidden;
        int const routes_per_rank = p.token_capacity * p.top_k;
        int const owner = p.world_size == 1 ? 0 : row_info / routes_per_rank;
        return p.route_output[owner] + int64_t{row_info - owner * routes_per_rank} * p.hidden;
    }

    static __device__ __forceinline__ void store(ForwardParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const& info) {
        RowPointers rows;
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            bool const is_row = warp_row + strip_row(i) < tile.num_rows;
            rows.row[i] = is_row ? output_row(p, task.segment, info.row[i]) : nullptr;
        }
#pragma unroll
        for (int first = 0; first < kTileColumns; first += kStripColumns) {
            constexpr int kPairs = kStripColumns / 4;
            uint32_t packed[kPairs];
#pragma unroll
            for (int i = 0; i < kPairs; ++i) packed[i] = pack_bf16(acc[first / 2 + 2 * i], acc[first / 2 + 2 * i + 1]);
            store_strip<true>(staging, packed, rows, tile.column * kTileColumns + first, p.hidden);
        }
    }
};

}  // namespace mok
