// Asynchronous copies (PTX ISA, "Data Movement and Conversion Instructions": cp.async.bulk, st.async).
#pragma once

#include <cstdint>

namespace mok::ptx {

// Copies a multiple of 16 bytes, 16-byte aligned, to this CTA's shared memory.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t shared, void const* global, uint32_t num_bytes,
                                                   uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared),
        "l"(global), "r"(num_bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_store(void* global, uint32_t shared, uint32_t num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
                 "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the writes of all but the newest kPending groups of this thread have been made.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d(uint32_t shared, void const* map, int c0, int c1, int c2,
                                                        uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
        : "memory");
}

// The same, written to the same offset of every CTA in `cta_mask`, completing on the same barrier offset there.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(uint32_t shared, void const* map, int c0, int c1,
                                                                  int c2, uint32_t barrier, uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(cta_mask)
        : "memory");
}

// Stores 16 bytes into a CTA of the cluster and completes them on that CTA's barrier (both shared::cluster addresses).
__device__ __forceinline__ void st_async_v4(uint32_t shared, int4 value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(shared),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
        : "memory");
}

}  // namespace mok::ptx
