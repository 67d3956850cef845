// d_x of each route = d_gate W_gate + d_up W_up, pushed to the slot of the route on the rank that owns the token, and
// the router gradient of the route.
#pragma once

#include "../../common/tensor_maps.h"
#include "block_op.cuh"

namespace mok {

struct GateUpGradient : BlockOp<TileKind::kSecond> {
    static constexpr int kBoxesA = kTileRows / kBoxRows;
    static constexpr int kBoxesB = kTileColumns / kBoxRows;

    // First along gate, then along up. None where only the router gradient is wanted.
    static __device__ __forceinline__ int num_steps(BackwardParams const& p, Task const& task) {
        return p.needs_d_x ? 2 * half_steps(p, task) : 0;
    }
    static __device__ __forceinline__ Box box_a(BackwardParams const& p, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        int const up_depth = depth - half_steps(p, task) * kTileDepth;
        int const row = task.ring_row + tile.block_row + i * kBoxRows;
        if (up_depth < 0) return {&maps.d_gate[task.segment], depth, row, 0};
        return {&maps.d_up[task.segment], up_depth, row, 0};
    }
    static __device__ __forceinline__ Box box_b(BackwardParams const& p, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        int const up_depth = depth - half_steps(p, task) * kTileDepth;
        int const column = tile.column * kTileColumns + i * kBoxRows;
        if (up_depth < 0) return {&maps.gate[task.segment], column, depth, task.expert};
        return {&maps.up[task.segment], column, up_depth, task.expert};
    }

    static __device__ __forceinline__ void wait_ready(BackwardParams const& p, Task const& task, Progress&,
                                                      WaitReport const& report) {
        poll_first(p, task.segment, task.block, report);
    }

    static __device__ __forceinline__ int row_info(BackwardParams const& p, Task const& task, int block_row) {
        return RouteRows::row_info(p, task, block_row);
    }
    static __device__ __forceinline__ void store(BackwardParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const& info) {
        if (p.needs_d_x) RouteRows::store(p, task, tile, acc, staging, warp_row, info);
        SegmentGradients const& gradients = p.gradients[task.segment];
        if (gradients.d_weight_parts == nullptr || tile.column != 0 || threadIdx.x % kLanesPerRow != 0) return;
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            int const row = warp_row + strip_row(i);
            if (row < tile.num_rows) push_router_gradient(p, task, task.ring_row + tile.block_row + row, info.row[i]);
        }
    }

  private:
    static __device__ __forceinline__ int half_steps(BackwardParams const& p, Task const& task) {
        return ceil_div(p.segments[task.segment].intermediate, kTileDepth);
    }

    // The sum over the row's tiles of the first GEMM, in their order.
    static __device__ __forceinline__ void push_router_gradient(BackwardParams const& p, Task const& task, int row,
                                                                int route) {
        int const num_parts = p.segments[task.segment].first_tiles;
        float const* const parts = p.gradients[task.segment].d_weight_parts + int64_t{row} * num_parts;
        float sum = 0.0f;
        for (int i = 0; i < num_parts; ++i) sum += parts[i];
        int const owner = RouteRows::owner_of(p, route);
        p.d_router_weights[owner][route] = sum;
    }
};

}  // namespace mok
