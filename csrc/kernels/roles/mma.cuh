// Multiplies the stages and stores the result through the op's epilogue.
#pragma once

#include "../../device/mma/sm90.cuh"
#include "../shared_storage.cuh"

namespace mok {

// Lets go of a stage in every CTA whose multicast may refill it.
__device__ __forceinline__ void release_stage(SharedStorage& storage, int slot) {
    int const lane = threadIdx.x % kWarpSize;
    if (lane < kClusterSize) storage.tiles.release_in(slot, lane);
}

__device__ __forceinline__ void multiply_tile(float (&acc)[kAccumulators], SharedStorage& storage,
                                              RingPosition<kStages>& at, int num_steps, int warpgroup,
                                              WaitReport const& report) {
    int previous = 0;
    for (int step = 0; step < num_steps; ++step) {
        storage.tiles.wait(at, report);
        ptx::wgmma_fence();
        mma_step(acc, shared_address(storage.a[at.slot()]) + warpgroup * kWarpgroupRows * kTileRowBytes,
                 shared_address(storage.b[at.slot()]), step > 0);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (step > 0) release_stage(storage, previous);
        previous = at.slot();
        at.advance();
    }
    ptx::wgmma_wait_group<0>();
    release_stage(storage, previous);
}

template <class Program>
__device__ __forceinline__ void mma_role(typename Program::Params const& params, SharedStorage& storage) {
    WaitReport const report = Program::report(params);
    int const warp = threadIdx.x / kWarpSize - kHelperWarps;
    uint32_t const staging = shared_address(storage.staging[warp]);
    TaskReader tasks;
    RingPosition<kStages> at;
    Task task;
    float acc[kAccumulators];
    while (tasks.next(storage, report, task)) {
        Tile const tile =
            tile_of_cta(task.num_rows, task.column, Program::column_tiles(params, task), ptx::cluster_ctarank());
        // Lane r % 16 keeps what the epilogue must know of row r, loaded here so that the multiplication hides the
        // latency.
        int const row_info = Program::row_info(params, task, tile, warp * kStripRows + threadIdx.x % kStripRows);
        multiply_tile(acc, storage, at, ceil_div(Program::depth(params, task), kTileDepth), warp / 4, report);
        if (tile.num_rows == 0) continue;
        Program::with_op(task.kind, [&](auto op) {
            using Op = decltype(op);
            Op::store(params, task, tile, acc, staging, warp * kStripRows, row_info);
            __syncwarp();
            if (threadIdx.x % kWarpSize == 0) Op::signal(params, task);
        });
    }
}

}  // namespace mok
