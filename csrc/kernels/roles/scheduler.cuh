// Hands out tasks in order, each when its inputs are ready. Taking them from a counter instead of by CTA index evens
// out slow SMs, and needs no CTA but running ones: whatever an early task waits for was taken earlier, by a CTA that
// runs.
#pragma once

#include "../shared_storage.cuh"

namespace mok {

__device__ __forceinline__ void publish_task(SharedStorage& storage, RingPosition<kTaskSlots> const& at,
                                             Task const& task) {
    ptx::fence_acq_rel_gpu();  // passes on what the waits have acquired; one fence is cheaper than a release in each
                               // arrival
    int4 const* const words = reinterpret_cast<int4 const*>(&task);
    uint32_t const slot = shared_address(&storage.tasks[at.slot()]);
    uint32_t const full = shared_address(&storage.task_ring.full[at.slot()]);
    for (int cta = 0; cta < kClusterSize; ++cta) {
        uint32_t const remote_full = ptx::mapa(full, cta);
        ptx::mbarrier_arrive_expect_tx_cluster(remote_full, sizeof(Task));
        ptx::st_async_v4(ptx::mapa(slot, cta), words[0], remote_full);
        ptx::st_async_v4(ptx::mapa(slot, cta) + 16, words[1], remote_full);
    }
}

// One thread of the first CTA of a cluster.
template <class Program>
__device__ __forceinline__ void scheduler_role(typename Program::Params const& params, SharedStorage& storage) {
    if (threadIdx.x % kWarpSize != 0) return;
    WaitReport const report = Program::report(params);
    auto const tasks = Program::tasks(params);
    typename Program::Progress progress = {};
    RingPosition<kTaskSlots> at;
    for (;;) {
        storage.task_ring.acquire(at, report);
        Task task;
        do {
            task = tasks.decode(ptx::atom_relaxed_gpu_add(&params.counters->next_task, 1));
        } while (task.kind != kLastTask && Program::is_idle(params, task));
        if (task.kind != kLastTask) Program::wait_ready(params, task, progress, report);
        publish_task(storage, at, task);
        if (task.kind == kLastTask) return;
        at.advance();
    }
}

}  // namespace mok
