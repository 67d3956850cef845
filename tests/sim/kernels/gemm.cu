// c[m, n] = a[m, k] b[n, k]^T in the usual warp-specialised form: a producer warp fills a ring by TMA, a consumer
// warpgroup multiplies, its epilogue stores through shared memory by TMA. Tiles of 64 x 64 x 64, persistent over the
// tiles. BUG plants one fault each; tests/sim/test_checks.py says which check finds it.
#include "ptx.cuh"

#ifndef BUG
#define BUG 0
#endif
enum {
    kNoBug,
    kNoProxyFence,
    kCountOffByOne,
    kReusedTooEarly,
    kSwappedSwizzle,
    kNoAcquire,
    kNeverArrives,
    kStagingReused,
    kNoWgmmaWait,
    kNoInitFence
};

struct Map {
    alignas(64) uint4 words[8];
};
constexpr int kStages = 3, kTileBytes = 64 * 64 * 2;

struct Storage {
    alignas(1024) unsigned char a[kStages][kTileBytes];
    alignas(1024) unsigned char b[kStages][kTileBytes];
    alignas(1024) __nv_bfloat162 c[64][32];
    uint64_t full[kStages], empty[kStages];
};

extern "C" __global__ void __launch_bounds__(160, 1)
    gemm(const __grid_constant__ Map a_map, const __grid_constant__ Map b_map, const __grid_constant__ Map c_map, int m,
         int n, int k, unsigned* ready, unsigned* finished) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Storage& s = *reinterpret_cast<Storage*>(memory);
    const int t = threadIdx.x, tiles = m / 64 * (n / 64);
    if (t == 0) {
        for (int i = 0; i < kStages; ++i)
            mbarrier_init(&s.full[i], 1), mbarrier_init(&s.empty[i], BUG == kCountOffByOne ? 3 : 4);
        if (BUG != kNoInitFence) fence_mbarrier_init();
    }
    __syncthreads();
    int stage = 0, phase = 0;
    auto advance = [&] {
        if (++stage == kStages) stage = 0, phase ^= 1;
    };
    if (t >= 128) {
        if (t != 128) return;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row = tile / (n / 64) * 64, column = tile % (n / 64) * 64;
            for (int d = 0; d < k; d += 64) {
                mbarrier_wait(&s.empty[stage], phase ^ 1);
                mbarrier_arrive_expect_tx(&s.full[stage], 2 * kTileBytes + (BUG == kNeverArrives ? 16 : 0));
                tensor_load_2d(s.a[stage], &a_map, d, row, &s.full[stage]);
                tensor_load_2d(s.b[stage], &b_map, d, column, &s.full[stage]);
                advance();
            }
        }
        return;
    }
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float acc[32];
        int previous = -1;
        for (int d = 0; d < k; d += 64) {
            mbarrier_wait(&s.full[stage], phase);
            wgmma_fence();
            for (int step = 0; step < 4; ++step)
                wgmma_64x64<0, 0>(
                    acc, descriptor(shared_address(s.a[stage]) + step * 32, 16, 1024, BUG == kSwappedSwizzle ? 2 : 1),
                    descriptor(shared_address(s.b[stage]) + step * 32, 16, 1024, 1), d > 0 || step > 0);
            wgmma_commit();
            if (BUG == kReusedTooEarly) previous = stage;
            wgmma_wait<1>();
            if (previous >= 0 && t % 32 == 0) mbarrier_arrive(&s.empty[previous]);
            previous = BUG == kReusedTooEarly ? -1 : stage;
            advance();
        }
        if (BUG != kNoWgmmaWait) wgmma_wait<0>();
        if (previous >= 0 && t % 32 == 0) mbarrier_arrive(&s.empty[previous]);
        if (BUG != kStagingReused && t == 0) bulk_wait_read<0>();  // the staging buffer is free again
        asm volatile("bar.sync 1, 128;" ::: "memory");
        for (int j = 0; j < 32; j += 2) {
            const int row = t / 32 * 16 + t % 32 / 4 + (j / 2 % 2) * 8;
            s.c[row][j / 4 * 4 + t % 4] = __floats2bfloat162_rn(acc[j], acc[j + 1]);
        }
        if (BUG != kNoProxyFence) fence_proxy_async();
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (t == 0) {
            tensor_store_2d(&c_map, s.c, tile % (n / 64) * 64, tile / (n / 64) * 64);
            bulk_commit();
        }
    }
    // Tell the last CTA that this one's tiles are in memory.
    if (t == 0) {
        bulk_wait<0>();
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ready) : "memory");
    }
    if (t != 0 || blockIdx.x != 0) return;
    unsigned seen = 0;
    while (seen != gridDim.x) {
        if (BUG == kNoAcquire)
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
        else
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
    }
    // Reads one element of the last tile through another path than it was written.
    unsigned short last;
    asm volatile("ld.global.u16 %0, [%1];"
                 : "=h"(last)
                 : "l"(reinterpret_cast<unsigned short*>(finished + 4) + m * n - 1)
                 : "memory");
    *finished = last;
}
