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

// A signal that a warp owes for its last tile. Signalling waits about 1,000 cycles for the tile's stores to arrive, so
// it is done behind the first two multiplications of the next tile; but never later than a wait, which may be for what
// the signal sets free.
template <class Program>
class OwedSignal {
  public:
    __device__ __forceinline__ explicit OwedSignal(typename Program::Params const& params) : params_(params) {}
    __device__ __forceinline__ void owe(Task const& task) {
        counter_ = Program::done_counter(params_, task);
        __syncwarp();
    }
    __device__ __forceinline__ void pay() {
        if (counter_ != nullptr && threadIdx.x % kWarpSize == 0) Program::signal(params_, counter_);
        counter_ = nullptr;
        __syncwarp();
    }

  private:
    typename Program::Params const& params_;
    uint32_t* counter_ = nullptr;
};

__device__ __forceinline__ void clear_accumulators(float (&acc)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.0f;
}

// acc (+)= the product over num_steps stages.
template <class L, class Program>
__device__ __forceinline__ void multiply_tile(float (&acc)[kAccumulators], bool accumulate, SharedStorage& storage,
                                              RingPosition<kStages>& at, int num_steps, int warpgroup,
                                              OwedSignal<Program>& owed, WaitReport const& report) {
    if (!storage.tiles.is_full(at)) owed.pay();
    int const last_before_pay = min_int(1, num_steps - 1);
    int previous = 0;
    for (int step = 0; step < num_steps; ++step) {
        storage.tiles.wait(at, report);
        ptx::wgmma_fence();
        mma_step<L>(acc, shared_address(storage.a[at.slot()]) + warpgroup * kWarpgroupRows * kTileRowBytes,
                    shared_address(storage.b[at.slot()]), accumulate || step > 0);
        ptx::wgmma_commit_group();
        if (step == last_before_pay) owed.pay();
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
    int const warpgroup = __shfl_sync(0xFFFFFFFFu, warp / (kWarpgroupThreads / kWarpSize), 0);
    uint32_t const staging = shared_address(storage.staging[warp]);
    OwedSignal<Program> owed(params);
    TaskReader tasks;
    RingPosition<kStages> at;
    Task task;
    float acc[kAccumulators];
    for (;;) {
        if (!tasks.is_ready(storage)) owed.pay();
        if (!tasks.next(storage, report, task)) break;
        Tile const tile = Program::tile(params, task, ptx::cluster_ctarank());
        // Lane r % 16 keeps what the epilogue must know of row r, loaded here so that the multiplication hides the
        // latency.
        auto const row_info = Program::row_info(params, task, tile, warp * kStripRows);
        int const num_steps = Program::num_steps(params, task);
        bool const accumulate = Program::load_accumulators(params, task, acc);
        if (num_steps > 0) {
            Program::with_layout(task.kind, [&](auto layout) {
                multiply_tile<decltype(layout)>(acc, accumulate, storage, at, num_steps, warpgroup, owed, report);
            });
        } else {
            owed.pay();
            if (!accumulate) clear_accumulators(acc);
        }
        if (tile.num_rows == 0 || Program::store_accumulators(params, task, acc)) continue;
        Program::with_op(task.kind, [&](auto op) {
            decltype(op)::store(params, task, tile, acc, staging, warp * kStripRows, row_info);
        });
        owed.owe(task);
    }
    owed.pay();
}

}  // namespace mok
