// Fills the stages by TMA: one thread a CTA.
#pragma once

#include "../../device/ptx/copy.cuh"
#include "../shared_storage.cuh"

namespace mok {

// A part of an operand tile, and where it lies in memory.
struct Box {
    CUtensorMap const* map;
    int column;
    int row;
    int matrix;
};

// The tile of A is this CTA's own. CTAs that share the tile of B load half of its boxes each and multicast them.
template <class Op, class Params, class Maps>
__device__ __forceinline__ void load_stage(Params const& params, Maps const& maps, SharedStorage& storage, int slot,
                                           Task const& task, Tile const& tile, int depth) {
    uint32_t const full = shared_address(&storage.tiles.full[slot]);
    // A CTA without rows goes along with the other one, but it signals nothing when it is done, so by then the rows may
    // be overwritten: it must not read them.
    bool const has_rows = tile.num_rows > 0 || tile.multicast;
    ptx::mbarrier_arrive_expect_tx(full, (has_rows ? kTileBytesA : 0) + kTileBytesB);
#pragma unroll
    for (int i = 0; i < Op::kBoxesA; ++i) {
        if (!has_rows) break;
        Box const box = Op::box_a(params, maps, task, tile, depth, i);
        ptx::cp_async_bulk_tensor_3d(shared_address(storage.a[slot]) + i * (kTileBytesA / Op::kBoxesA), box.map,
                                     box.column, box.row, box.matrix, full);
    }
    uint32_t const b = shared_address(storage.b[slot]);
    constexpr int kBytes = kTileBytesB / Op::kBoxesB;
    if (tile.multicast) {
        constexpr int kShare = Op::kBoxesB / kClusterSize;
        int const first = ptx::cluster_ctarank() * kShare;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            Box const box = Op::box_b(params, maps, task, tile, depth, first + i);
            ptx::cp_async_bulk_tensor_3d_multicast(b + (first + i) * kBytes, box.map, box.column, box.row, box.matrix,
                                                   full, (1 << kClusterSize) - 1);
        }
        return;
    }
    for (int i = 0; i < Op::kBoxesB; ++i) {
        Box const box = Op::box_b(params, maps, task, tile, depth, i);
        ptx::cp_async_bulk_tensor_3d(b + i * kBytes, box.map, box.column, box.row, box.matrix, full);
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
            Tile const tile = Op::tile(params, task, ptx::cluster_ctarank());
            int const num_steps = Op::num_steps(params, task);
            for (int step = 0; step < num_steps; ++step) {
                storage.tiles.acquire(at, report);
                load_stage<Op>(params, maps, storage, at.slot(), task, tile, step * kTileDepth);
                at.advance();
            }
        });
    }
}

}  // namespace mok
