// Fills the stages: rows of A gathered one by one with cp.async, the weight tile B by TMA.
#pragma once

#include "../../device/ptx/copy.cuh"
#include "../shared_storage.cuh"

namespace mok {

constexpr int kRowsPerLoadPass = kLoadWarps * kWarpSize / kRowChunks;
constexpr int kLoadPasses = kTileRows / kRowsPerLoadPass;
// A load warp tells the MMA role about its rows this many steps late: cp.async completes in program order, and it must
// not wait for the newest.
constexpr int kCommitLag = 2;
static_assert(kCommitLag <= kStages - 2,
              "a stage must be committed before the load role waits for one that depends on it");

// Waits for this thread's copies of the stage that was issued kPending groups ago and commits the warp's part of it.
template <int kPending>
__device__ __forceinline__ void commit_rows(SharedStorage& storage, int slot) {
    ptx::cp_async_wait_group<kPending>();
    ptx::fence_proxy_async_shared();  // cp.async writes through the generic proxy, wgmma reads through the async proxy
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(shared_address(&storage.tiles.full[slot]));
}

template <class Op, class Program>
__device__ __forceinline__ void load_weights(typename Program::Params const& params,
                                             typename Program::TensorMaps const& maps, SharedStorage& storage, int slot,
                                             Task const& task, Tile const& tile, int depth) {
    constexpr int kHalfBytes = kTileBytesB / 2;
    uint32_t const full = shared_address(&storage.tiles.full[slot]);
    uint32_t const b = shared_address(storage.b[slot]);
    ptx::mbarrier_arrive_expect_tx(full, kTileBytesB);
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

template <class Op, class Program>
__device__ __forceinline__ void load_tile(typename Program::Params const& params,
                                          typename Program::TensorMaps const& maps, SharedStorage& storage,
                                          RingPosition<kStages>& at, Task const& task, WaitReport const& report) {
    Tile const tile = tile_of_cta(task.num_rows, task.column, Op::column_tiles(params, task), ptx::cluster_ctarank());
    int const thread = threadIdx.x;
    int const chunk = thread % kRowChunks;
    bf16 const* rows[kLoadPasses];
#pragma unroll
    for (int i = 0; i < kLoadPasses; ++i) {
        int const row = i * kRowsPerLoadPass + thread / kRowChunks;
        rows[i] = row < tile.num_rows ? Op::input_row(params, task, tile.block_row + row) : nullptr;
    }
    int const depth = Op::depth(params, task);
    int const num_steps = ceil_div(depth, kTileDepth);
    int previous[kCommitLag];
    for (int step = 0; step < num_steps; ++step) {
        storage.tiles.acquire(at, report);
        if (thread == 0) {
            load_weights<Op, Program>(params, maps, storage, at.slot(), task, tile, step * kTileDepth);
        }
        int const column = step * kTileDepth + chunk * 8;
        uint32_t const a = shared_address(storage.a[at.slot()]);
#pragma unroll
        for (int i = 0; i < kLoadPasses; ++i) {
            int const row = i * kRowsPerLoadPass + thread / kRowChunks;
            bool const valid = rows[i] != nullptr && column < depth;
            bf16 const* const source = valid ? rows[i] + column : Op::any_address(params, task);
            ptx::cp_async_16(a + swizzled_offset(row, chunk), source, valid ? kChunkBytes : 0);
        }
        ptx::cp_async_commit_group();
        if (step >= kCommitLag) commit_rows<kCommitLag>(storage, previous[kCommitLag - 1]);
#pragma unroll
        for (int i = kCommitLag - 1; i > 0; --i) previous[i] = previous[i - 1];
        previous[0] = at.slot();
        at.advance();
    }
    // The next task may wait for what this one feeds, so nothing stays uncommitted.
    if (num_steps > 1) commit_rows<1>(storage, previous[1]);
    commit_rows<0>(storage, previous[0]);
}

template <class Program>
__device__ __forceinline__ void load_role(typename Program::Params const& params,
                                          typename Program::TensorMaps const& maps, SharedStorage& storage) {
    WaitReport const report = Program::report(params);
    typename Program::Readiness readiness;
    TaskReader tasks;
    RingPosition<kStages> at;
    Task task;
    while (tasks.next(storage, report, task)) {
        Program::with_op(task.kind, [&](auto op) {
            using Op = decltype(op);
            if (threadIdx.x % kWarpSize == 0) Op::wait_ready(params, task, readiness, report);
            __syncwarp();
            load_tile<Op, Program>(params, maps, storage, at, task, report);
        });
    }
}

}  // namespace mok
