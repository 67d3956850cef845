// Fills the stages by TMA: one thread a CTA.
#pragma once

#include "../../device/ptx/copy.cuh"
#include "../shared_storage.cuh"

namespace mok {

// The tile of A is this CTA's own. The weight tile B comes in two halves: CTAs that share it load one each and
// multicast it.
template <class Op>
__device__ __forceinline__ void load_stage(TensorMaps const& maps, SharedStorage& storage, int slot, Task const& task,
                                           Tile const& tile, int input_row, int depth) {
    constexpr int kHalfBytes = kTileBytesB / 2;
    uint32_t const full = shared_address(&storage.tiles.full[slot]);
    uint32_t const b = shared_address(storage.b[slot]);
    ptx::mbarrier_arrive_expect_tx(full, kTileBytesA + kTileBytesB);
    ptx::cp_async_bulk_tensor_3d(shared_address(storage.a[slot]), Op::input_map(maps, task.segment), depth, input_row,
                                 0, full);
    if (tile.multicast) {
        int const half = ptx::cluster_ctarank();
        auto const source = Op::weight_half(maps, task.segment, tile.column, half);
        ptx::cp_async_bulk_tensor_3d_multicast(b + half * kHalfBytes, source.map, depth, source.row, task.expert, full,
                                               (1 << kClusterSize) - 1);
        return;
    }
    for (int half = 0; half < 2; ++half) {
        auto const source = Op::weight_half(maps, task.segment, tile.column, half);
        ptx::cp_async_bulk_tensor_3d(b + half * kHalfBytes, source.map, depth, source.row, task.expert, full);
    }
}

template <class Program>
__device__ __forceinline__ void load_role(typename Program::Params const& params,
                                          typename Program::TensorMaps const& maps, SharedStorage& storage) {
    WaitReport const report = Program::report(params);
    TaskReader tasks;
    RingPosition<kStages> at;
    Task task;
    while (tasks.next(storage, report, task)) {
        if (threadIdx.x % kWarpSize != 0) continue;
        Program::with_op(task.kind, [&](auto op) {
            using Op = decltype(op);
            ptx::fence_proxy_async_global();  // the rows were written by ordinary stores, which the scheduler has
                                              // waited for
            Tile const tile =
                tile_of_cta(task.num_rows, task.column, Op::column_tiles(params, task), ptx::cluster_ctarank());
            int const input_row = Op::input_row(task) + tile.block_row;
            for (int depth = 0; depth < Op::depth(params, task); depth += kTileDepth) {
                storage.tiles.acquire(at, report);
                load_stage<Op>(maps, storage, at.slot(), task, tile, input_row, depth);
                at.advance();
            }
        });
    }
}

}  // namespace mok
