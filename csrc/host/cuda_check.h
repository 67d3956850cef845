// CUDA failures become exceptions that name the call.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace mok {

inline void check_cuda(cudaError_t status, char const* call) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // a failed launch must not surface again in somebody else's call
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

#define MOK_CUDA(call) ::mok::check_cuda((call), #call)

}  // namespace mok
