// Lanes of a warp: exchange, agreement, divergence (PTX ISA 9.7.9.6, 9.7.12, 9.7.13.2, 9.7.13.8 to 9.7.13.12).
#include <cstdint>

constexpr unsigned kAll = 0xffffffff;

extern "C" __global__ void warp_exchange(const int* in, int* out) {
    const int lane = threadIdx.x, v = in[lane];
    int row = 0;
    auto put = [&](int r) { out[row++ * 32 + lane] = r; };
    put(__shfl_sync(kAll, v, 5));
    put(__shfl_up_sync(kAll, v, 3));
    put(__shfl_down_sync(kAll, v, 2, 8));
    put(__shfl_xor_sync(kAll, v, 9));
    put(__ballot_sync(kAll, v > 0));
    put(__all_sync(kAll, v > -1000000) + 2 * __any_sync(kAll, v == in[7]));
    put(__match_any_sync(kAll, v & 3));
    put(__reduce_add_sync(kAll, v));
    put(__reduce_max_sync(kAll, v));
    uint32_t is_leader;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(is_leader));
    put(__popc(__ballot_sync(kAll, is_leader)));
    if (lane % 2)
        put(__shfl_sync(0xaaaaaaaa, v, 31));
    else
        put(__activemask() & 0x55555555 ? 1 : 0);
}

__device__ __noinline__ int collatz(int n) {
    int steps = 0;
    while (n > 1 && steps < 500) n = n % 2 ? 3 * n + 1 : n / 2, ++steps;
    return steps;
}

// Loops of different length, a call, a switch, and lanes that wait for each other.
extern "C" __global__ void divergence(const int* in, int* out) {
    __shared__ volatile int turn;
    const int lane = threadIdx.x;
    if (lane == 0) turn = 0;
    __syncwarp();
    int r = collatz(in[lane]);
    switch (in[lane] & 7) {
        case 0:
            r += 100;
            break;
        case 1:
            r = r * 3 + in[lane];
            break;
        case 2:
            r ^= 0x55;
            break;
        case 3:
            r = -r;
            break;
        case 4:
            r = __popc(r);
            break;
        case 5:
            r = r * r;
            break;
        case 6:
            r += lane;
            break;
        default:
            r = 7;
    }
    while (turn != 31 - lane) {
    }
    turn = turn + 1;
    __syncwarp();
    out[lane] = r;
    out[32 + lane] = turn;
    if (lane > 20) return;
    out[64 + lane] = __popc(__ballot_sync(0x1fffff, 1));
}
