// The one place that launches kernels.
#pragma once

#include "cuda_check.h"

namespace mok {

struct LaunchConfig {
    int grid;
    int threads;
    int cluster;
    int shared_bytes;
    bool is_cooperative;  // all CTAs resident at once, for kernels whose CTAs wait for each other without a task order
    cudaStream_t stream;
};

template <class... Params>
void launch(void (*kernel)(Params...), LaunchConfig const& config, Params const&... params) {
    MOK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t launch_config = {};
    launch_config.gridDim = dim3(config.grid);
    launch_config.blockDim = dim3(config.threads);
    launch_config.dynamicSmemBytes = config.shared_bytes;
    launch_config.stream = config.stream;
    launch_config.attrs = attributes;
    launch_config.numAttrs = config.is_cooperative ? 2 : 1;
    MOK_CUDA(cudaLaunchKernelEx(&launch_config, kernel, params...));
}

// Sets the device for a scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        MOK_CUDA(cudaGetDevice(&previous_));
        if (device != previous_) MOK_CUDA(cudaSetDevice(device));
    }
    ~DeviceGuard() { cudaSetDevice(previous_); }
    DeviceGuard(DeviceGuard const&) = delete;
    DeviceGuard& operator=(DeviceGuard const&) = delete;

  private:
    int previous_ = 0;
};

}  // namespace mok
