// The simulator's own content of a CUtensorMap: what cuTensorMapEncodeTiled was asked for.
#pragma once

#include <cstdint>

namespace moksim {

struct TensorMap {
    static constexpr uint64_t kMagic = 0x4d4f4b54454e534full;
    uint64_t magic;
    uint64_t base;
    uint64_t strides[4];  // bytes, of dimensions 1 to 4
    uint32_t dims[5];     // elements
    uint16_t box[5];
    uint8_t rank, element_bytes, swizzle, is_float, is_signed, is_bf16,
        fills_nan;  // swizzle: 0 none, 1 32B, 2 64B, 3 128B
};
static_assert(sizeof(TensorMap) <= 128);

// 16-byte chunks of a shared address are permuted within 8 * span bytes (PTX ISA 5.5.7).
inline uint32_t swizzle_address(uint32_t address, int swizzle) {
    const uint32_t bits = (1u << swizzle) - 1;
    return address ^ ((address >> 7 & bits) << 4);
}

}  // namespace moksim
