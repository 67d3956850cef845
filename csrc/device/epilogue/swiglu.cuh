// SwiGLU on pairs of bf16 pre-activations.
#pragma once

#include "store_rows.cuh"

namespace mok {

__device__ __forceinline__ float silu(float x) {
    return __fdividef(x, 1.0f + __expf(-x));
}

// silu(min(gate, limit)) * clamp(up, -limit, limit). The inputs are the rounded values that backward will see, so a
// recomputed activation has the same bits.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    float const clamped_gate = gate > limit ? limit : gate;  // written so that a NaN passes through
    float const clamped_up = up > limit ? limit : (up < -limit ? -limit : up);
    return silu(clamped_gate) * clamped_up;
}

__device__ __forceinline__ uint32_t swiglu_bf16(uint32_t gate, uint32_t up, float limit) {
    float2 const g = unpack_bf16(gate);
    float2 const u = unpack_bf16(up);
    return pack_bf16(swiglu(g.x, u.x, limit), swiglu(g.y, u.y, limit));
}

}  // namespace mok
