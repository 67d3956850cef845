// Barriers of a CTA and of a cluster, mbarriers, shared memory of other CTAs (PTX ISA 9.7.13.1, .3, .15; 9.7.9.12,
// .23).
#include "ptx.cuh"

// Producers and consumers over named barriers: the two halves swap values through one buffer.
extern "C" __global__ void named_barriers(const int* in, int* out) {
    __shared__ int buffer[64];
    const int t = threadIdx.x;
    if (t < 64) {
        for (int round = 0; round < 4; ++round) {
            asm volatile("bar.sync 2, 128;" ::: "memory");  // the buffer is free
            buffer[t] = in[round * 64 + t];
            asm volatile("bar.arrive 1, 128;" ::: "memory");
        }
    } else {
        asm volatile("bar.arrive 2, 128;" ::: "memory");
        for (int round = 0; round < 4; ++round) {
            asm volatile("bar.sync 1, 128;" ::: "memory");
            out[round * 64 + t - 64] = buffer[127 - t] * 2;
            if (round < 3) asm volatile("bar.arrive 2, 128;" ::: "memory");
        }
    }
    if (__syncthreads_or(t == 3) && __syncthreads_count(t % 2) == 64) out[256 + t] = 1;
}

// A ring of two slots between two warps, over mbarriers with phases. RING_BUG plants a fault.
extern "C" __global__ void ring(const int* in, int* out, int rounds) {
    __shared__ int slots[2][32];
    __shared__ uint64_t full[2], empty[2];
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
#if RING_BUG == 1
            mbarrier_init(&full[s], 33);
#else
            mbarrier_init(&full[s], 32);
#endif
#if RING_BUG == 2
            mbarrier_init(&empty[s], 2);
#else
            mbarrier_init(&empty[s], 1);
#endif
        }
    }
    __syncthreads();
    for (int i = 0; i < rounds; ++i) {
        const int s = i % 2, phase = i / 2 % 2;
        if (threadIdx.x < 32) {
#if RING_BUG == 3
            if (i != 2) mbarrier_wait(&empty[s], phase ^ 1);
#else
            mbarrier_wait(&empty[s], phase ^ 1);
#endif
            slots[s][lane] = in[i * 32 + lane];
            mbarrier_arrive(&full[s]);
        } else {
            mbarrier_wait(&full[s], phase);
            out[i * 32 + lane] = slots[s][31 - lane];
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&empty[s]);
        }
    }
}

// Every CTA of the cluster writes into the next one's shared memory: by plain stores and by st.async.
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster(int* out) {
    __shared__ int plain[32];
    __shared__ __align__(16) int4 async[32];
    __shared__ uint64_t barrier;
    const int lane = threadIdx.x;
    const uint32_t rank = cluster_rank(), next = (rank + 1) % 4;
    if (lane == 0) mbarrier_init(&barrier, 1), mbarrier_arrive_expect_tx(&barrier, sizeof async);
    cluster_sync();
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(mapa(&plain[lane], next)), "r"(rank * 100 + lane) : "memory");
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     mapa(&async[lane], next)),
                 "r"(rank), "r"(lane), "r"(7), "r"(rank + lane), "r"(mapa(&barrier, next))
                 : "memory");
    mbarrier_wait(&barrier, 0);
    cluster_sync();
    int* to = out + blockIdx.x * 64;
    to[lane] = plain[lane];
    to[32 + lane] = async[lane].x * 1000 + async[lane].y + async[lane].z + async[lane].w;
}

// Warpgroups trade registers: without the decrease the increase would wait for ever.
extern "C" __global__ void __launch_bounds__(256, 1) registers(int* out) {
    if (threadIdx.x < 128) {
#ifndef NO_DECREASE
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
        out[threadIdx.x] = 1;
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 256;");
        out[threadIdx.x] = 2;
    }
}
