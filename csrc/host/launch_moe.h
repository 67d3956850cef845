// Launches a program of the persistent kernel.
#pragma once

#include "../kernels/persistent.cuh"
#include "launch.h"
#include "plan.h"

namespace mok {

template <class Program>
void launch_program(typename Program::Params const& params, typename Program::TensorMaps const& maps,
                    LaunchSettings const& settings) {
    // Ranks wait for each other inside the launch only with device barriers: then every CTA must be resident.
    LaunchConfig const config = {plan_ctas(settings),    kThreads,
                                 kClusterSize,           static_cast<int>(sizeof(SharedStorage)),
                                 params.device_barriers, reinterpret_cast<cudaStream_t>(settings.stream)};
    launch(persistent_kernel<Program>, config, params, maps);
}

// Whether no rank has tokens: nothing to do, and no buffers to describe. Others may have some where this one has none.
inline bool has_no_tokens(MoeParams const& params) {
    return (params.world_size == 1 ? params.num_tokens : params.token_capacity) == 0;
}

// A matrix of `width` columns, whose rows are row_stride elements apart.
inline MatrixView rows_at(bf16 const* data, int64_t row_stride) {
    return {reinterpret_cast<uint64_t>(data), row_stride * kTileRows, row_stride};
}

}  // namespace mok
