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

    static __device__ __forceinline__ void wait_ready(ForwardParams const& p, Task const& task, Readiness&,
                                                      WaitReport const& report) {
        SegmentParams const& segment = p.segments[task.segment];
        wait_at_least(&segment.gate_up_done[task.block], stores_of_block(task.num_rows, segment.gate_up_tiles),
                      kGateUpTimeout, task.block, report);
    }

    static __device__ __forceinline__ bf16 const* input_row(ForwardParams const& p, Task const& task, int block_row) {
        return activation_row(p.segments[task.segment], task.block, block_row);
    }
    static __device__ __forceinline__ bf16 const* any_address(ForwardParams const& p, Task const& task) {
        return p.segments[task.segment].activation;
    }

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
                                                 int row_info) {
        constexpr int kPairs = kAccumulators / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t packed[kPairs];
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                packed[i] = pack_bf16(acc[2 * (half * kPairs + i)], acc[2 * (half * kPairs + i) + 1]);
            }
            int const first_column = tile.column * kTileColumns + half * kStripColumns;
            store_strip(staging, packed, p.hidden - first_column, [&](int row) -> bf16* {
                int const info = __shfl_sync(0xFFFFFFFFu, row_info, row);
                return warp_row + row < tile.num_rows ? output_row(p, task.segment, info) + first_column : nullptr;
            });
        }
    }

    static __device__ __forceinline__ void signal(ForwardParams const& p, Task const& task) {
        if (p.world_size > 1) ptx::fence_acq_rel_sys();
        ptx::red_release_gpu_add(&p.segments[task.segment].down_done[task.block], 1);
    }
};

}  // namespace mok
