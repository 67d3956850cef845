// Asynchronous copies (PTX ISA, "Data Movement and Conversion Instructions": cp.async, cp.async.bulk.tensor, st.async).
#pragma once

#include <cstdint>

namespace mok::ptx {

// Copies 16 bytes, or writes 16 zeros when num_bytes is 0. L2 only: the rows are read once per CTA.
__device__ __forceinline__ void cp_async_16(uint32_t shared, void const* global, uint32_t num_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_tensormap(void const* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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
