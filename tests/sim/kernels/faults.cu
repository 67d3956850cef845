// One small fault per kernel; test_checks.py says which check finds it and what its message must name.
#include "ptx.cuh"

extern "C" __global__ void out_of_bounds(const int* rows, const int* in, int* out) {
    const int row = rows[threadIdx.x];  // a row index that nobody checked
    out[threadIdx.x] = in[row * 32 + threadIdx.x];
}

extern "C" __global__ void misaligned(const char* in, int4* out) {
    out[threadIdx.x] = *reinterpret_cast<const int4*>(in + 4 * threadIdx.x);
}

extern "C" __global__ void uninitialised_shared(int* out) {
    __shared__ int buffer[64];
    if (threadIdx.x < 63) buffer[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = buffer[threadIdx.x];
}

extern "C" __global__ void uninitialised_global(int* scratch, int* out) {
    if (threadIdx.x == 0) scratch[0] = 1;
    __syncthreads();
    out[threadIdx.x] = scratch[threadIdx.x / 32];
}

extern "C" __global__ void missing_barrier(int* out) {
    __shared__ int buffer[64];
    buffer[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = buffer[63 - threadIdx.x];
}

// CTA 0 publishes, CTA 1 reads. kind 0 is right; 1 to 4 each lack something.
extern "C" __global__ void publish(int* data, unsigned* flag, int* out, int kind) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x;
        if (kind != 1) __syncthreads();
        if (threadIdx.x != 0) return;
        if (kind == 2)
            asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
        else if (kind == 4)
            asm volatile("st.release.cta.global.u32 [%0], 1;" ::"l"(flag) : "memory");
        else
            asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
        return;
    }
    unsigned seen = 0;
    while (!seen) {
        if (kind == 3)
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        else
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    }
    out[threadIdx.x] = data[63 - threadIdx.x];
}

extern "C" __global__ void read_only_path(int* data, int* out) {
    data[threadIdx.x] = threadIdx.x;
    __syncthreads();
    int v;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(data + (threadIdx.x + 1) % 64));
    out[threadIdx.x] = v;
}

extern "C" __global__ void half_a_barrier(int* out) {
    if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x] = 1;
}

extern "C" __global__ void never_arrives(unsigned* counter, int* out) {
    if (threadIdx.x == 0) {
        unsigned seen = 0;
        while (seen != 2) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    }
    __syncthreads();
    out[threadIdx.x] = 1;
}

// A wait with a time limit ends by itself, because virtual time jumps when nothing moves.
extern "C" __global__ void time_limit(unsigned* counter, int* out) {
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    unsigned seen = 0;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (seen == 0 && now - start < 500'000'000);
    out[threadIdx.x] = seen ? 1 : 2;
}

extern "C" __global__ void ordinary_access_to_mbarrier(int* out) {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) mbarrier_init(&barrier, 1);
    __syncthreads();
    out[threadIdx.x] = static_cast<int>(*reinterpret_cast<volatile uint64_t*>(&barrier));
}

extern "C" __global__ void mbarrier_without_init_order(int* out) {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) mbarrier_init(&barrier, 1), mbarrier_arrive(&barrier);
    if (threadIdx.x >= 32) {
        asm volatile("nanosleep.u32 500;");
        mbarrier_wait(&barrier, 0);
    }
    out[threadIdx.x] = 1;
}

extern "C" __global__ void shuffle_from_absent_lane(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_sync(0xffff, v, 20);
    out[threadIdx.x] = v;
}

extern "C" __global__ void copy_in_flight_at_exit(const float* in, float* out) {
    __shared__ __align__(16) float buffer[32];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        mbarrier_init(&barrier, 1), fence_mbarrier_init();
        mbarrier_arrive_expect_tx(&barrier, sizeof buffer);
        bulk_load(buffer, in, sizeof buffer, &barrier);
    }
    out[threadIdx.x] = 0;
}

// Ranks meet through flags in each other's memory, then read the peer's data. kind 1: the scope is too narrow.
extern "C" __global__ void exchange(int* mine, unsigned* my_flag, const int* theirs, const unsigned* their_flag,
                                    int* out, int kind) {
    mine[threadIdx.x] = threadIdx.x + 1000 * kind;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (kind == 1)
            asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(my_flag) : "memory");
        else
            asm volatile("st.release.sys.global.u32 [%0], 1;" ::"l"(my_flag) : "memory");
        unsigned seen = 0;
        while (!seen) asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(their_flag) : "memory");
    }
    __syncthreads();
    out[threadIdx.x] = theirs[threadIdx.x];
}
