// Writes a warp's 16 x 64 strip of bf16 to rows that may lie anywhere, one 128-byte line a row.
#pragma once

#include "../ptx/memory.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/swizzle.cuh"

namespace mok {

constexpr int kStripRows = 16;
constexpr int kStripColumns = 64;
// 16 bytes of padding a row keep both directions free of bank conflicts with addresses that differ by constants only.
// (An XOR swizzle would need sixteen address registers, which spilled; shared memory leaves next to no L1, so that
// every refill went to L2: 14,000 cycles a tile.)
constexpr int kStripPitch = kStripColumns * 2 + 16;
constexpr int kStripBytes = kStripRows * kStripPitch;

constexpr int kLanesPerRow = kStripColumns * 2 / kChunkBytes;  // that store one row
constexpr int kRowsAtATime = kWarpSize / kLanesPerRow;
constexpr int kRowsPerLane = kStripRows / kRowsAtATime;

// The i-th row of a strip that this lane stores.
__device__ __forceinline__ int strip_row(int i) {
    return i * kRowsAtATime + threadIdx.x % kWarpSize / kLanesPerRow;
}

// Where this lane's rows begin; null drops a row.
struct RowPointers {
    bf16* row[kRowsPerLane];
};

// `packed[2 * g + h]` holds columns 8g + 2(lane % 4) + {0, 1} of row lane / 4 + 8h, as wgmma leaves its accumulators.
// The detour through shared memory turns 4-byte pieces into whole 32-byte sectors.
__device__ __forceinline__ void stage_strip(uint32_t staging, uint32_t const* packed) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const written = staging + (lane % 8 + lane / 8 % 2 * 8) * kStripPitch + lane / 16 * kChunkBytes;
#pragma unroll
    for (int j = 0; j < kStripColumns / 16; ++j) {
        ptx::stmatrix_x4(written + j * 2 * kChunkBytes, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                         packed[4 * j + 3]);
    }
    __syncwarp();
}

// Columns 8(lane % kLanesPerRow) and following of this lane's i-th row of the staged strip.
__device__ __forceinline__ int4 staged_row(uint32_t staging, int i) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const read = staging + lane / kLanesPerRow * kStripPitch + lane % kLanesPerRow * kChunkBytes;
    return ptx::ld_shared_v4(read + i * kRowsAtATime * kStripPitch);
}

// Stores a packed strip to columns first_column and following of the rows; what lies at or beyond num_columns (a
// multiple of 8) is dropped. kStreaming: the rows are not read again soon and need not stay in L2.
template <bool kStreaming>
__device__ __forceinline__ void store_strip(uint32_t staging, uint32_t const* packed, RowPointers const& rows,
                                            int first_column, int num_columns) {
    int const lane = threadIdx.x % kWarpSize;
    stage_strip(staging, packed);
    int const column = first_column + lane % kLanesPerRow * 8;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        int4 const value = staged_row(staging, i);
        if (rows.row[i] == nullptr || column >= num_columns) continue;
        if constexpr (kStreaming) {
            ptx::st_global_v4(rows.row[i] + column, value, ptx::createpolicy_evict_first());
        } else {
            ptx::st_global_v4(rows.row[i] + column, value);
        }
    }
    __syncwarp();
}

// Several strips side by side.
template <bool kStreaming, int kPacked>
__device__ __forceinline__ void store_strips(uint32_t staging, uint32_t const (&packed)[kPacked],
                                             RowPointers const& rows, int first_column, int num_columns) {
#pragma unroll
    for (int i = 0; i < kPacked; i += kStripColumns / 4) {
        store_strip<kStreaming>(staging, packed + i, rows, first_column + 4 * i, num_columns);
    }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t const*>(&pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

}  // namespace mok
