// Waits that end: every spin has a time limit, and the first one that runs out is recorded for the host.
#pragma once

#include "../../common/params.h"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/memory.cuh"

namespace mok {

// What a wait is called when it fails.
struct WaitReport {
    ErrorRecord* record;
    uint32_t* claims;  // device memory, zero before the launch: atomics do not reach host memory on every machine
    int64_t timeout_ns;
    int32_t rank;
};

__device__ __forceinline__ void report_error(WaitReport const& report, ErrorCode code, int task, int64_t expected,
                                             int64_t seen) {
    if (ptx::atom_relaxed_gpu_add(report.claims, 1) != 0) return;  // the first error is the cause
    ptx::st_relaxed_sys_s32(&report.record->rank, report.rank);
    ptx::st_relaxed_sys_s32(&report.record->cta, blockIdx.x);
    ptx::st_relaxed_sys_s32(&report.record->task, task);
    ptx::st_relaxed_sys_s64(&report.record->expected, expected);
    ptx::st_relaxed_sys_s64(&report.record->seen, seen);
    ptx::fence_acq_rel_sys();
    ptx::st_relaxed_sys_s32(&report.record->code, code);
}

// True once the time is up, or another wait has failed. Looks at the clock on every 256th call only.
class Deadline {
  public:
    __device__ __forceinline__ bool passed(WaitReport const& report) {
        if (++calls_ % 256 != 0) return false;
        uint64_t const now = ptx::globaltimer();
        if (start_ == 0) start_ = now;
        if (now - start_ < kGraceNs) return false;
        if (now - start_ > static_cast<uint64_t>(report.timeout_ns)) return true;
        return ptx::ld_acquire_gpu(report.claims) != 0;
    }

  private:
    static constexpr uint64_t kGraceNs = 1000000;
    uint64_t start_ = 0;
    uint32_t calls_ = 0;
};

// Spins until the counter reaches `expected` (relaxed: the caller fences). After a failure the caller goes on with
// wrong data: nothing hangs, and the host raises.
__device__ __forceinline__ void poll_at_least(uint32_t const* counter, uint32_t expected, ErrorCode code, int task,
                                              WaitReport const& report) {
    Deadline deadline;
    for (;;) {
        uint32_t const seen = ptx::ld_relaxed_gpu(counter);
        if (seen >= expected) return;
        if (deadline.passed(report)) return report_error(report, code, task, expected, seen);
        __nanosleep(20);
    }
}

// The same with acquire.
__device__ __forceinline__ void wait_at_least(uint32_t const* counter, uint32_t expected, ErrorCode code, int task,
                                              WaitReport const& report) {
    poll_at_least(counter, expected, code, task, report);
    ptx::fence_acq_rel_gpu();
}

// The same for a counter in peer-visible memory whose values wrap.
__device__ __forceinline__ void wait_generation(uint32_t const* flag, uint32_t generation, int peer,
                                                WaitReport const& report) {
    Deadline deadline;
    for (;;) {
        uint32_t const seen = ptx::ld_acquire_sys(flag);
        if (static_cast<int32_t>(seen - generation) >= 0) return;
        if (deadline.passed(report)) return report_error(report, kBarrierTimeout, peer, generation, seen);
        __nanosleep(100);
    }
}

__device__ __forceinline__ void wait_mbarrier(uint32_t barrier, uint32_t parity, WaitReport const& report) {
    if (ptx::mbarrier_try_wait_parity(barrier, parity)) return;
    Deadline deadline;
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
        if (deadline.passed(report)) return report_error(report, kPipelineTimeout, -1, parity, -1);
    }
}

}  // namespace mok
