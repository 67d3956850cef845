// The skeleton that every direction and precision shares: place shared memory, start the barriers, give each warp its
// role.
#pragma once

#include "roles/load.cuh"
#include "roles/mma.cuh"
#include "roles/scheduler.cuh"
#include "shared_storage.cuh"

namespace mok {

// The helper warps load, schedule (one warp) and do the program's background work; the others multiply.
constexpr int kThreads = (kHelperWarps + kMmaWarps) * kWarpSize;
// setmaxnreg budgets; 128 accumulators a thread and the epilogue need the most. They share out what the kernel starts
// with. More helper warps would leave it fewer than the 154 registers that ptxas wants for an m64n256 instruction.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kHelperRegisters = 88;
constexpr int kMmaRegisters = 208;
static_assert(kHelperWarps * kHelperRegisters + kMmaWarps * kMmaRegisters <=
                  (kHelperWarps + kMmaWarps) * kLaunchRegisters,
              "setmaxnreg.inc would wait for ever for registers that the CTA was not launched with");

// The last CTA sets the launch's counters back to zero, which saves the next launch a memset.
template <class Params>
__device__ __forceinline__ void clear_counters(Params const& params, bool& is_last) {
    if (threadIdx.x == 0) is_last = ptx::atom_acq_rel_gpu_add(&params.counters->finished_ctas, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    for (int i = threadIdx.x; i < params.num_block_counters; i += blockDim.x) params.block_counters[i] = 0;
    if (threadIdx.x != 0) return;
    uint32_t const generation = params.counters->barrier_generation;
    *params.counters = LaunchCounters{};
    params.counters->barrier_generation = generation + (params.device_barriers ? kRankBarriers : 0);
}

template <class Program>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_kernel(__grid_constant__ typename Program::Params const params,
                      __grid_constant__ typename Program::TensorMaps const maps) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared_memory);
    storage.init(threadIdx.x == 0);

    int const warp = threadIdx.x / kWarpSize;
    if (warp < kHelperWarps) {
        ptx::setmaxnreg_dec<kHelperRegisters>();
        if (warp < kLoadWarps) {
            load_role<Program>(params, maps, storage);
        } else if (warp == kLoadWarps && ptx::cluster_ctarank() == 0) {
            scheduler_role<Program>(params, storage);
        } else {  // the other CTAs' scheduler warps have nothing to schedule
            Program::background(params, storage.copy, kHelperWarps - 1 - warp);
        }
    } else {
        ptx::setmaxnreg_inc<kMmaRegisters>();
        mma_role<Program>(params, storage);
        Program::after_gemm(params);
    }

    // No CTA may leave while a peer of its cluster can still write to its shared memory.
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    clear_counters(params, storage.is_last_cta);
}

}  // namespace mok
