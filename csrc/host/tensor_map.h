// TMA descriptors of stacked weights, made by the driver's encoder, which is looked up at run time: the library links
// no libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok {

// A bf16 weight [experts, rows, depth], depth contiguous, any row and expert stride (in elements).
struct WeightView {
    uint64_t data = 0;
    int64_t expert_stride = 0;
    int64_t row_stride = 0;
};

// Boxes of box_rows x 64 columns in the 128-byte swizzle; what lies outside the weight reads as zero.
CUtensorMap encode_weight(WeightView const& weight, int num_experts, int num_rows, int depth, int box_rows);

}  // namespace mok
