// Barriers between the ranks of an expert-parallel group, in symmetric memory, by generation: nothing is ever set back.
#pragma once

#include "../../common/params.h"
#include "../../device/sync/wait.cuh"

namespace mok {

// Called by one warp of the rank once all of the rank's work before the barrier is released to it.
__device__ __forceinline__ void signal_ranks(MoeParams const& p, int barrier) {
    uint32_t const generation = p.counters->barrier_generation + barrier + 1;
    ptx::fence_acq_rel_sys();
    for (int peer = 0; peer < p.world_size; ++peer) ptx::st_release_sys(p.flags[peer] + p.rank, generation);
}

__device__ __forceinline__ void wait_ranks(MoeParams const& p, int barrier, WaitReport const& report) {
    uint32_t const generation = p.counters->barrier_generation + barrier + 1;
    for (int peer = 0; peer < p.world_size; ++peer) {
        wait_generation(p.flags[p.rank] + peer, generation, peer, report);
    }
}

}  // namespace mok
