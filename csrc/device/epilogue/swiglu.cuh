// SwiGLU on pairs of bf16 pre-activations.
#pragma once

#include "../ptx/math.cuh"
#include "store_rows.cuh"

namespace mok {

// x sigmoid(x) = h + h tanh(h), h = x / 2. One special-function instruction instead of two (exp and reciprocal), which
// were half of the epilogue; its relative error of 2^-11 is a quarter of the rounding to bf16 that follows.
__device__ __forceinline__ float silu(float x) {
    float const half = 0.5f * x;
    return fmaf(half, ptx::tanh_approx(half), half);
}

// silu(min(gate, limit)) * clamp(up, -limit, limit); NaN passes through. The inputs are the rounded values that
// backward will see, so a recomputed activation has the same bits.
template <bool kClamped>
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    if constexpr (!kClamped) return silu(gate) * up;
    return silu(ptx::min_nan(gate, limit)) * ptx::max_nan(ptx::min_nan(up, limit), -limit);
}

template <bool kClamped>
__device__ __forceinline__ uint32_t swiglu_bf16(uint32_t gate, uint32_t up, float limit) {
    float2 const g = unpack_bf16(gate);
    float2 const u = unpack_bf16(up);
    return pack_bf16(swiglu<kClamped>(g.x, u.x, limit), swiglu<kClamped>(g.y, u.y, limit));
}

// gate[i] = swiglu(gate[i], up[i]) for bf16 pairs.
template <bool kClamped, int kPairs>
__device__ __forceinline__ void swiglu_pairs(uint32_t (&gate)[kPairs], uint32_t const (&up)[kPairs], float limit) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        gate[i] = swiglu_bf16<kClamped>(gate[i], up[i], limit);
        if (i % 4 == 3) {  // four pairs at a time hide each other's latency; all at once would spill
            asm volatile("" : "+r"(gate[i - 3]), "+r"(gate[i - 2]), "+r"(gate[i - 1]), "+r"(gate[i]));
        }
    }
}

// What backward needs of one element: a, and the derivatives of a by gate and up.
struct SwigluSlopes {
    float activation;
    float by_gate;
    float by_up;
};

// by_gate = u (s + silu(g) (1 - s)) with s = sigmoid(g), by_up = silu(g); zero beyond the limit, as torch.clamp has it.
template <bool kClamped>
__device__ __forceinline__ SwigluSlopes swiglu_slopes(float gate, float up, float limit) {
    float const g = kClamped ? ptx::min_nan(gate, limit) : gate;
    float const u = kClamped ? ptx::max_nan(ptx::min_nan(up, limit), -limit) : up;
    float const sigmoid = fmaf(0.5f, ptx::tanh_approx(0.5f * g), 0.5f);
    float const s = silu(g);
    SwigluSlopes slopes = {s * u, u * fmaf(s, 1.0f - sigmoid, sigmoid), s};
    if constexpr (kClamped) {
        if (gate > limit) slopes.by_gate = 0.0f;
        if (fabsf(up) > limit) slopes.by_up = 0.0f;
    }
    return slopes;
}

}  // namespace mok
