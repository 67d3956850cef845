// Matrix instructions (PTX ISA 9.7.14, 9.7.15). Operands are bf16.
#include "ptx.cuh"

struct Map {
    alignas(64) uint4 words[8];
};

// d[64, 64] = a[64, 64] b[64, 64]^T. An operand that is K-major lies as [rows, k] in memory, one that is MN-major as
// [k, rows]; TMA brings it in boxes as wide as the swizzle. kSwizzle: 1 128 B, 2 64 B, 3 32 B, as in the descriptor.
template <int kTransA, int kTransB, int kSwizzle>
__device__ void multiply(const Map& a_map, const Map& b_map, float* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int kSpan = 256 >> kSwizzle, kBoxes = 128 / kSpan, kBoxBytes = 64 * kSpan;
    unsigned char *a = memory, *b = memory + 8192;
    __shared__ uint64_t barrier;
    const int t = threadIdx.x;
    if (t == 0) mbarrier_init(&barrier, 1), fence_mbarrier_init();
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive_expect_tx(&barrier, 16384);
        for (int i = 0; i < kBoxes; ++i) {
            tensor_load_2d(a + i * kBoxBytes, &a_map, i * kSpan / 2, 0, &barrier);
            tensor_load_2d(b + i * kBoxBytes, &b_map, i * kSpan / 2, 0, &barrier);
        }
    }
    mbarrier_wait(&barrier, 0);
    // K-major: 16 deep is 32 bytes along a line, so a step may lie in the next box. MN-major: 16 lines down.
    auto make = [&](unsigned char* base, bool trans, int step) {
        const int byte = trans ? step * 16 * kSpan : step * 32 / kSpan * kBoxBytes + step * 32 % kSpan;
        return descriptor(shared_address(base) + byte, trans ? kBoxBytes : 16, 8 * kSpan, kSwizzle);
    };
    float d[32];
    wgmma_fence();
    for (int step = 0; step < 4; ++step)
        wgmma_64x64<kTransA, kTransB>(d, make(a, kTransA, step), make(b, kTransB, step), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    for (int j = 0; j < 32; ++j) {  // 9.7.15.5.1.1: the accumulator's layout
        const int row = t / 32 * 16 + t % 32 / 4 + (j / 2 % 2) * 8, column = j / 4 * 8 + t % 4 * 2 + j % 2;
        out[row * 64 + column] = d[j];
    }
}
#define MULTIPLY(name, ...)                                                                                     \
    extern "C" __global__ void name(const __grid_constant__ Map a, const __grid_constant__ Map b, float* out) { \
        multiply<__VA_ARGS__>(a, b, out);                                                                       \
    }
MULTIPLY(wgmma_kk_128, 0, 0, 1)
MULTIPLY(wgmma_kk_64, 0, 0, 2)
MULTIPLY(wgmma_kk_32, 0, 0, 3)
MULTIPLY(wgmma_km_128, 0, 1, 1)
MULTIPLY(wgmma_mk_128, 1, 0, 1)
MULTIPLY(wgmma_mm_64, 1, 1, 2)
MULTIPLY(wgmma_mm_32, 1, 1, 3)

// Fragments: ldmatrix of A and (transposed) of B [k, n], mma.sync, and stmatrix of the bf16 result. One warp, 16 x 8
// x 16.
extern "C" __global__ void fragments(const uint4* a, const uint4* b, uint4* out, float* exact) {
    __shared__ __align__(16) __nv_bfloat16 as[16 * 16], bs[16 * 8], ds[16 * 8];
    const int t = threadIdx.x;
    reinterpret_cast<uint4*>(as)[t] = a[t];
    if (t < 16) reinterpret_cast<uint4*>(bs)[t] = b[t];
    __syncwarp();
    uint32_t x[4], y[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(&as[t % 16 * 16 + t / 16 * 8]))
                 : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(y[0]), "=r"(y[1])
                 : "r"(shared_address(&bs[t % 16 * 8]))
                 : "memory");
    float d[4] = {0, 1, 2, 3};
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    for (int i = 0; i < 4; ++i) exact[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
    uint32_t p, q;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(d[1]), "f"(d[0]));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(q) : "f"(d[3]), "f"(d[2]));
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(&ds[t % 16 * 8])),
                 "r"(p), "r"(q)
                 : "memory");
    __syncwarp();
    if (t < 16) out[t] = reinterpret_cast<uint4*>(ds)[t];
}

// A from registers: fragments loaded with ordinary loads from row-major a[64, 16]; b[64, 16] is staged by ordinary
// stores in the layout without swizzle (8 x 16 byte core matrices), so the async proxy needs a fence.
extern "C" __global__ void wgmma_registers(const uint32_t* a, const uint4* b, float* out) {
    __shared__ __align__(128) uint4 bs[128];
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4;
    bs[t / 2 / 8 * 8 + t / 2 % 8 + t % 2 * 64] = b[t];  // chunk t % 2 of line t / 2
    fence_proxy_async();
    __syncthreads();
    uint32_t x[4] = {a[row * 8 + pair], a[(row + 8) * 8 + pair], a[row * 8 + pair + 4], a[(row + 8) * 8 + pair + 4]};
    float d[32];
    wgmma_fence();
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MMA_REGISTERS
                 ", {%32, %33, %34, %35}, %36, 0, 1, 1, 0;"
                 : MMA_D(d)
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(descriptor(shared_address(bs), 1024, 128, 0)));
    wgmma_commit();
    wgmma_wait<0>();
    for (int j = 0; j < 32; ++j) out[(row + (j / 2 % 2) * 8) * 64 + j / 4 * 8 + pair * 2 + j % 2] = d[j];
}
