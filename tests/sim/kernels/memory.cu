// Loads, stores, atomics and state spaces (PTX ISA 9.7.9, 9.7.13.6, 5.1).
#include <cstdint>

__constant__ int table[4] = {3, 1, 4, 1};
__device__ int device_counter = 5;

extern "C" __global__ void memory(const int4* in, int4* out, unsigned* counters, float* sums, int n) {
    extern __shared__ int staged[];
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x;
    int local[16];
#pragma unroll 1
    for (int k = 0; k < 16; ++k) local[k] = k * t;
    int4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(in + i));
    staged[t] = v.x;
    __syncthreads();
    int* generic = t % 2 ? staged + (t + 1) % blockDim.x : local + (v.y & 15);
    v.z += *generic + table[v.w & 3];
    reinterpret_cast<int8_t*>(&v)[3] = static_cast<int8_t>(t);
    out[i] = v;
    atomicAdd(&counters[0], 1u);
    atomicMax(&counters[1], static_cast<unsigned>(i));
    atomicCAS(&counters[2], 0u, 77u);
    atomicAdd(&sums[i % 4], 0.5f);
    asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(sums + 4), "f"(1.f) : "memory");
    if (i == n - 1) atomicAdd(&device_counter, 37), counters[3] = atomicExch(&device_counter, 5);
}
