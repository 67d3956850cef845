// Hopper's matrix multiply for one warpgroup: 64 rows x 256 columns, accumulators in registers.
#pragma once

#include "../ptx/wgmma.cuh"
#include "../tile/swizzle.cuh"

namespace mok {

constexpr int kWarpgroupRows = 64;
constexpr int kAccumulators = kWarpgroupRows * kTileColumns / kWarpgroupThreads;

// wgmma matrix descriptor of a K-major tile in 128-byte swizzle (PTX ISA, "Matrix Descriptor Format"): address and
// stride in 16-byte units; the stride between groups of eight rows is 1024 bytes; the leading-dimension offset is not
// used by this layout.
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t shared) {
    constexpr uint64_t kLeading = 1;
    constexpr uint64_t kStride = 8 * kTileRowBytes / 16;
    constexpr uint64_t kSwizzle128 = 1;
    return (shared & 0x3FFFF) >> 4 | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}

// acc (+)= a[64 x 64] b[256 x 64]^T, asynchronous: the caller fences before and waits after.
__device__ __forceinline__ void mma_step(float (&acc)[kAccumulators], uint32_t a, uint32_t b, bool accumulate) {
    constexpr int kInstructionDepth = 16;
    uint64_t const desc_a = k_major_descriptor(a);
    uint64_t const desc_b = k_major_descriptor(b);
#pragma unroll
    for (int k = 0; k < kTileDepth / kInstructionDepth; ++k) {
        constexpr uint64_t kAdvance = kInstructionDepth * 2 / 16;
        ptx::wgmma_m64n256k16_bf16(acc, desc_a + k * kAdvance, desc_b + k * kAdvance, accumulate || k > 0);
    }
}

}  // namespace mok
