// Hopper's matrix multiply for one warpgroup: 64 rows x 256 columns, accumulators in registers.
#pragma once

#include "../ptx/wgmma.cuh"
#include "../tile/swizzle.cuh"

namespace mok {

constexpr int kWarpgroupRows = 64;
constexpr int kAccumulators = kWarpgroupRows * kTileColumns / kWarpgroupThreads;

// How an operand tile lies in shared memory, in boxes of 64 lines of 128 bytes as TMA writes them: a line is 64 values
// along K of one row (or column) of the result, or 64 rows of the result at one K.
enum class Major { kK, kMN };
template <Major kMajorA, Major kMajorB>
struct Layout {
    static constexpr Major kA = kMajorA;
    static constexpr Major kB = kMajorB;
};

constexpr int kInstructionDepth = 16;
constexpr int kBoxRows = 64;
constexpr int kBoxBytes = kBoxRows * kTileRowBytes;

// wgmma matrix descriptor in 128-byte swizzle (PTX ISA, "Matrix Descriptor Format"), in 16-byte units: address; the
// distance of neighbouring boxes along M or N, which only an MN-major operand has; the distance of groups of eight
// lines.
template <Major kMajor>
__device__ __forceinline__ uint64_t descriptor(uint32_t shared) {
    constexpr uint64_t kLeading = kMajor == Major::kK ? 1 : kBoxBytes / 16;
    constexpr uint64_t kStride = 8 * kTileRowBytes / 16;
    constexpr uint64_t kSwizzle128 = 1;
    return (shared & 0x3FFFF) >> 4 | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}

// From one instruction to the next along K, in the descriptor's units.
template <Major kMajor>
constexpr uint64_t kAdvance = kInstructionDepth * (kMajor == Major::kK ? 2 : kTileRowBytes) / 16;

// acc (+)= a[64 x 64] b[256 x 64]^T, asynchronous: the caller fences before and waits after.
template <class L>
__device__ __forceinline__ void mma_step(float (&acc)[kAccumulators], uint32_t a, uint32_t b, bool accumulate) {
    uint64_t const desc_a = descriptor<L::kA>(a);
    uint64_t const desc_b = descriptor<L::kB>(b);
#pragma unroll
    for (int k = 0; k < kTileDepth / kInstructionDepth; ++k) {
        ptx::wgmma_m64n256k16_bf16<L::kA == Major::kMN, L::kB == Major::kMN>(
            acc, desc_a + k * kAdvance<L::kA>, desc_b + k * kAdvance<L::kB>, accumulate || k > 0);
    }
}

}  // namespace mok
