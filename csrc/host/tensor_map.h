// TMA descriptors, made by the driver's encoder, which is looked up at run time: the library links
// no libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok {

// bf16 matrices [batch, rows, depth], depth contiguous, any row and batch stride (in elements).
struct MatrixView {
    uint64_t data = 0;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
};

// Boxes of box_rows x 64 columns in the 128-byte swizzle; what lies outside the matrix reads as zero.
CUtensorMap encode_matrix(MatrixView const& matrix, int batch, int num_rows, int depth, int box_rows);

}  // namespace mok
