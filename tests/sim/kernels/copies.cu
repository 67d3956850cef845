// Asynchronous copies (PTX ISA 9.7.9.25 to 9.7.9.27).
#include "ptx.cuh"

// cp.async with zero fill behind src-size, two groups in flight, then one that arrives on an mbarrier.
extern "C" __global__ void cp_async(const int4* in, int4* out, int n) {
    __shared__ int4 buffer[3][64];
    __shared__ uint64_t barrier;
    const int t = threadIdx.x;
    if (t == 0) mbarrier_init(&barrier, 64);
    __syncthreads();
    auto copy = [&](int slot, int index, int bytes) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(&buffer[slot][t])),
                     "l"(in + index), "r"(bytes)
                     : "memory");
    };
    copy(0, t, 16);
    asm volatile("cp.async.commit_group;" ::: "memory");
    copy(1, 64 + t, t % 3 == 0 ? 0 : t % 3 == 1 ? 16 : 8);
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    out[t] = buffer[0][63 - t];
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    out[64 + t] = buffer[1][63 - t];
    copy(2, 128 + t, 128 + t < n ? 16 : 0);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
    mbarrier_wait(&barrier, 0);
    out[128 + t] = buffer[2][63 - t];
}

// Bulk copies in, a change by ordinary stores, bulk copies out, and a reduction into global memory.
extern "C" __global__ void bulk(const float* in, float* out, float* sums) {
    __shared__ __align__(128) float buffer[256];
    __shared__ uint64_t barrier;
    const int t = threadIdx.x;
    if (t == 0) mbarrier_init(&barrier, 1), fence_mbarrier_init();
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive_expect_tx(&barrier, sizeof buffer);
        bulk_load(buffer, in + blockIdx.x * 256, 512, &barrier);
        bulk_load(buffer + 128, in + blockIdx.x * 256 + 128, 512, &barrier);
    }
    mbarrier_wait(&barrier, 0);
    for (int i = t; i < 256; i += 64) buffer[i] = buffer[i] * 2 + 1;
#ifndef NO_PROXY_FENCE
    fence_proxy_async();
#endif
    __syncthreads();
    if (t == 0) {
        bulk_store(out + blockIdx.x * 256, buffer, sizeof buffer);
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums),
                     "r"(shared_address(buffer)), "r"(1024)
                     : "memory");
        bulk_commit();
#ifndef NO_WAIT
        bulk_wait_read<0>();
#endif
    }
}

struct Map {
    alignas(64) uint4 words[8];
};

// A tile in and out again at another place; the box may hang over every edge of the tensor.
extern "C" __global__ void tensor_tile(const __grid_constant__ Map in_map, const __grid_constant__ Map out_map,
                                       uint4* raw, int x, int y, int out_x, int out_y, int bytes) {
    extern __shared__ __align__(1024) uint4 tile[];
    __shared__ uint64_t barrier;
    const int t = threadIdx.x;
    if (t == 0) mbarrier_init(&barrier, 1), fence_mbarrier_init();
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive_expect_tx(&barrier, bytes);
        tensor_load_2d(tile, &in_map, x, y, &barrier);
    }
    mbarrier_wait(&barrier, 0);
    for (int i = t; i < bytes / 16; i += blockDim.x) raw[i] = tile[i];
    __syncthreads();
    if (t == 0) {
        tensor_store_2d(&out_map, tile, out_x, out_y);
        bulk_commit();
        bulk_wait_read<0>();
    }
}

// One CTA loads for both of its cluster.
extern "C" __global__ void __cluster_dims__(2, 1, 1) multicast(const __grid_constant__ Map map, int4* out) {
    __shared__ __align__(128) int4 tile[2][64];  // 16 rows of 64 bytes
    __shared__ uint64_t barrier;
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(&barrier, 1), fence_mbarrier_init();
        mbarrier_arrive_expect_tx(&barrier, sizeof tile);
    }
    cluster_sync();
    if (threadIdx.x == 0)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(tile[rank])),
            "l"(&map), "r"(0), "r"(rank * 16), "r"(shared_address(&barrier)), "h"(static_cast<uint16_t>(3))
            : "memory");
    mbarrier_wait(&barrier, 0);
    for (int i = threadIdx.x; i < 128; i += 32) out[rank * 128 + i] = tile[i / 64][i % 64];
    cluster_sync();
}
