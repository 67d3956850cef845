// Shared-memory operand tiles in the 128-byte swizzle that TMA writes and wgmma reads.
#pragma once

#include <cstdint>

#include "../../common/params.h"

namespace mok {

constexpr int kChunkBytes = 16;
constexpr int kTileRowBytes = kTileDepth * 2;  // 64 bf16: exactly one swizzle row
constexpr int kRowChunks = kTileRowBytes / kChunkBytes;

// Byte offset of a 16-byte chunk of a K-major tile: chunks of a 128-byte row are permuted by the row's index modulo 8.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
    return row * kTileRowBytes + ((chunk ^ (row & 7)) * kChunkBytes);
}

}  // namespace mok
