#include "tensor_map.h"

#include <sstream>

#include "../common/config.h"
#include "cuda_check.h"

namespace mok {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                 cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled find_encoder() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    constexpr unsigned int kFirstVersion = 12000;  // CUDA 12.0 brought tensor maps
    MOK_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kFirstVersion, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || entry == nullptr) {
        throw std::runtime_error(
            "cuTensorMapEncodeTiled: not found in the NVIDIA driver; mok needs a driver for CUDA 12.0 or newer");
    }
    return reinterpret_cast<EncodeTiled>(entry);
}

}  // namespace

CUtensorMap encode_matrix(MatrixView const& matrix, int batch, int num_rows, int depth, int box_rows) {
    static EncodeTiled const encode = find_encoder();
    constexpr cuuint64_t kElementBytes = 2;
    cuuint64_t const sizes[3] = {static_cast<cuuint64_t>(depth), static_cast<cuuint64_t>(num_rows),
                                 static_cast<cuuint64_t>(batch)};
    cuuint64_t const strides[2] = {matrix.row_stride * kElementBytes, matrix.batch_stride * kElementBytes};
    cuuint32_t const box[3] = {kTileDepth, static_cast<cuuint32_t>(box_rows), 1};
    cuuint32_t const element_strides[3] = {1, 1, 1};
    CUtensorMap map;
    CUresult const status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, reinterpret_cast<void*>(matrix.data), sizes, strides, box,
               element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        std::ostringstream message;
        message << "cuTensorMapEncodeTiled failed with " << status << " for a matrix at 0x" << std::hex << matrix.data
                << std::dec << " of shape [" << batch << ", " << num_rows << ", " << depth << "], strides in elements ["
                << matrix.batch_stride << ", " << matrix.row_stride << ", 1], box [" << box_rows << ", " << kTileDepth
                << "]";
        throw std::runtime_error(message.str());
    }
    return map;
}

}  // namespace mok
