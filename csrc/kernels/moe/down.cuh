// route_output = activation W_down^T, pushed to the slot of the route on the rank that owns the token.
#pragma once

#include "../../common/tensor_maps.h"
#include "block_op.cuh"

namespace mok {

struct Down : BlockOp<TileKind::kSecond> {
    static constexpr int kBoxesA = 1;
    static constexpr int kBoxesB = 2;

    static __device__ __forceinline__ int num_steps(MoeParams const& p, Task const& task) {
        return ceil_div(p.segments[task.segment].intermediate, kTileDepth);
    }
    static __device__ __forceinline__ Box box_a(MoeParams const&, ForwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int) {
        return {&maps.activation[task.segment], depth, task.ring_row + tile.block_row, 0};
    }
    static __device__ __forceinline__ Box box_b(MoeParams const&, ForwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int half) {
        return {&maps.down[task.segment], depth, tile.column * kTileColumns + half * (kTileColumns / 2), task.expert};
    }

    static __device__ __forceinline__ void wait_ready(MoeParams const& p, Task const& task, Progress&,
                                                      WaitReport const& report) {
        poll_first(p, task.segment, task.block, report);
    }

    static __device__ __forceinline__ int row_info(MoeParams const& p, Task const& task, int block_row) {
        return RouteRows::row_info(p, task, block_row);
    }
    static __device__ __forceinline__ void store(MoeParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const& info) {
        RouteRows::store(p, task, tile, acc, staging, warp_row, info);
    }
};

}  // namespace mok
