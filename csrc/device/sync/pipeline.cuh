// A ring of slots between warps that fill and warps that drain, in four verbs: acquire, commit (by the caller's
// copies), wait, release.
#pragma once

#include "wait.cuh"

namespace mok {

// Position in a ring of kSlots, with the phase bit of its mbarriers.
template <int kSlots>
class RingPosition {
  public:
    __device__ __forceinline__ int slot() const { return slot_; }
    __device__ __forceinline__ uint32_t phase() const { return phase_; }
    __device__ __forceinline__ void advance() {
        if (++slot_ == kSlots) {
            slot_ = 0;
            phase_ ^= 1;
        }
    }

  private:
    int slot_ = 0;
    uint32_t phase_ = 0;
};

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Full and empty barriers of a ring; lives in shared memory.
template <int kSlots>
struct RingBarriers {
    uint64_t full[kSlots];
    uint64_t empty[kSlots];

    __device__ __forceinline__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) {
        for (int i = 0; i < kSlots; ++i) {
            ptx::mbarrier_init(shared_address(&full[i]), full_arrivals);
            ptx::mbarrier_init(shared_address(&empty[i]), empty_arrivals);
        }
    }
    // Waits until the slot may be filled again; the first round finds every slot free.
    __device__ __forceinline__ void acquire(RingPosition<kSlots> const& at, WaitReport const& report) const {
        wait_mbarrier(shared_address(&empty[at.slot()]), at.phase() ^ 1, report);
    }
    // Whether wait() would return at once; the same for all lanes of a warp.
    __device__ __forceinline__ bool is_full(RingPosition<kSlots> const& at) const {
        return __all_sync(0xFFFFFFFFu, ptx::mbarrier_test_wait_parity(shared_address(&full[at.slot()]), at.phase()));
    }
    // Waits until the slot has been filled.
    __device__ __forceinline__ void wait(RingPosition<kSlots> const& at, WaitReport const& report) const {
        wait_mbarrier(shared_address(&full[at.slot()]), at.phase(), report);
    }
    // Releases the slot of a CTA of the cluster.
    __device__ __forceinline__ void release_in(int slot, uint32_t cta_rank) const {
        ptx::mbarrier_arrive_cluster(ptx::mapa(shared_address(&empty[slot]), cta_rank));
    }
};

}  // namespace mok
