// Writes a warp's 16 x 128 strip of bf16 to rows that may lie anywhere, 256 contiguous bytes a row.
#pragma once

#include "../ptx/memory.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/swizzle.cuh"

namespace mok {

constexpr int kStripRows = 16;
constexpr int kStripColumns = 128;
constexpr int kStripBytes = kStripRows * kStripColumns * 2;

// `packed[2 * g + h]` holds columns 8g + 2(lane % 4) + {0, 1} of row lane / 4 + 8h, as wgmma leaves its accumulators.
// `row_pointer(r)` gives where row r of the strip starts, or null to drop it; columns from num_columns on are dropped
// (a multiple of 8). The detour through shared memory turns 4-byte pieces into whole 32-byte sectors; the XOR keeps
// both directions free of bank conflicts.
template <class RowPointer>
__device__ __forceinline__ void store_strip(uint32_t staging, uint32_t const (&packed)[32], int num_columns,
                                            RowPointer row_pointer) {
    int const lane = threadIdx.x % kWarpSize;
    int const matrix_row = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        int const group = 2 * j + lane / 16;
        uint32_t const address =
            staging + matrix_row * (kStripColumns * 2) + ((group ^ (matrix_row & 7)) * kChunkBytes);
        ptx::stmatrix_x4(address, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
    }
    __syncwarp();
    int const chunk = lane % 16;
#pragma unroll
    for (int i = 0; i < kStripRows / 2; ++i) {
        int const row = 2 * i + lane / 16;
        bf16* const destination = row_pointer(row);
        int4 const value = ptx::ld_shared_v4(staging + row * (kStripColumns * 2) + ((chunk ^ (row & 7)) * kChunkBytes));
        if (destination != nullptr && chunk * 8 < num_columns) ptx::st_global_v4(destination + chunk * 8, value);
    }
    __syncwarp();
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t const*>(&pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

}  // namespace mok
