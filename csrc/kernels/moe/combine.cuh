// output[t] = (shared_output[t] +) sum over k of route_weights[t, k] * route_output[t, k], in that order, in fp32.
#pragma once

#include "../../device/epilogue/store_rows.cuh"
#include "rank_barrier.cuh"
#include "readiness.cuh"

namespace mok {

__device__ __forceinline__ void add_scaled(float (&sum)[8], int4 const& values, float scale) {
    uint32_t const words[4] = {static_cast<uint32_t>(values.x), static_cast<uint32_t>(values.y),
                               static_cast<uint32_t>(values.z), static_cast<uint32_t>(values.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 const pair = unpack_bf16(words[i]);
        sum[2 * i] = fmaf(scale, pair.x, sum[2 * i]);
        sum[2 * i + 1] = fmaf(scale, pair.y, sum[2 * i + 1]);
    }
}

// One token by one warp. Lane k holds route k's weight; `live` has a bit for each route that was not dropped.
__device__ __forceinline__ void combine_token(MoeParams const& p, int token, uint32_t live, float weight) {
    constexpr int kBatch = 8;
    int const lane = threadIdx.x % kWarpSize;
    uint64_t const streaming = ptx::createpolicy_evict_first();
    bf16 const* const routes = p.route_output[p.rank] + int64_t{token} * p.top_k * p.hidden;
    for (int first = 0; first < p.hidden; first += kWarpSize * 8) {
        int const column = first + lane * 8;
        bool const is_column = column < p.hidden;
        float sum[8] = {};
        if (p.shared_output != nullptr && is_column) {
            add_scaled(sum, ptx::ld_global_v4(p.shared_output + int64_t{token} * p.hidden + column, streaming), 1.0f);
        }
        for (int begin = 0; begin < p.top_k; begin += kBatch) {
            int4 values[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                bool const is_live = begin + i < p.top_k && (live >> (begin + i) & 1);
                if (is_live && is_column)
                    values[i] = ptx::ld_global_v4(routes + int64_t{begin + i} * p.hidden + column, streaming);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float const scale = __shfl_sync(0xFFFFFFFFu, weight, (begin + i) % kWarpSize);
                bool const is_live = begin + i < p.top_k && (live >> (begin + i) & 1);
                if (is_live && is_column) add_scaled(sum, values[i], scale);
            }
        }
        if (!is_column) continue;
        int4 const packed = {static_cast<int>(pack_bf16(sum[0], sum[1])), static_cast<int>(pack_bf16(sum[2], sum[3])),
                             static_cast<int>(pack_bf16(sum[4], sum[5])), static_cast<int>(pack_bf16(sum[6], sum[7]))};
        ptx::st_global_v4(p.output + int64_t{token} * p.hidden + column, packed);
    }
}

// The token's live routes as a ballot, the row of each in its lane (-1 dropped).
__device__ __forceinline__ uint32_t live_routes(MoeParams const& p, int token, int& row) {
    int const lane = threadIdx.x % kWarpSize;
    row = lane < p.top_k ? p.route_row[int64_t{token} * p.top_k + lane] : -1;
    return __ballot_sync(0xFFFFFFFFu, row >= 0);
}

__device__ __forceinline__ void combine_live(MoeParams const& p, int token, uint32_t live) {
    int const lane = threadIdx.x % kWarpSize;
    bool const is_live = live >> lane & 1;
    float const weight = !is_live                     ? 0.0f
                         : p.route_weights == nullptr ? 1.0f
                                                      : p.route_weights[int64_t{token} * p.top_k + lane];
    combine_token(p, token, live, weight);
}

// Walks the routed rows in order and combines each token at its last row, the moment that all of its rows exist. Only
// the tokens of the last blocks are left when the GEMMs end.
__device__ __forceinline__ void combine_rows(MoeParams const& p, int block, int block_row, int& done_blocks,
                                             WaitReport const& report) {
    BlockEntry const entry = p.blocks[block];
    if (block_row >= entry.num_rows) return;
    wait_second(p, kRoutedSegment, done_blocks, block, report);
    int const num_rows = min_int(kWarpSize, entry.num_rows - block_row);
    int const first_row = entry.first_row + block_row;
    int const lane = threadIdx.x % kWarpSize;
    // Lane r looks whether row r is its token's last one.
    bool is_last = false;
    int token = 0;
    if (lane < num_rows) {
        token = p.row_route[first_row + lane] / p.top_k;
        is_last = true;
        for (int k = 0; k < p.top_k; ++k) is_last &= p.route_row[int64_t{token} * p.top_k + k] <= first_row + lane;
    }
    for (uint32_t pending = __ballot_sync(0xFFFFFFFFu, is_last); pending != 0; pending &= pending - 1) {
        int const next = __shfl_sync(0xFFFFFFFFu, token, __ffs(pending) - 1);
        int row;
        combine_live(p, next, live_routes(p, next, row));
    }
}

// Tokens by index: all of them, or only those without a live route.
__device__ __forceinline__ void combine_tokens(MoeParams const& p, int first_token, bool only_dropped) {
    for (int token = first_token; token < min_int(first_token + kWarpSize, p.num_tokens); ++token) {
        int row;
        uint32_t const live = live_routes(p, token, row);
        if (!only_dropped || live == 0) combine_live(p, token, live);
    }
}

// Called by any warp that has time, any number of times: items come from a counter.
__device__ __forceinline__ void combine(MoeParams const& p, WaitReport const& report) {
    constexpr int kGroups = kBlockRows / kWarpSize;
    if (p.output == nullptr) return;
    int const lane = threadIdx.x % kWarpSize;
    bool const by_row = p.combine_by_row;
    int const num_blocks = p.gemm ? num_routed_blocks(p) : 0;
    int const num_row_items = by_row ? num_blocks * kGroups : 0;
    int const num_items = num_row_items + ceil_div(p.num_tokens, kWarpSize);
    int done_blocks = 0, done_shared_blocks = 0;
    if (p.gemm) wait_second(p, kSharedSegment, done_shared_blocks, p.num_shared_blocks - 1, report);
    if (!by_row) wait_second(p, kRoutedSegment, done_blocks, num_blocks - 1, report);
    for (;;) {
        int item = lane == 0 ? ptx::atom_relaxed_gpu_add(&p.counters->next_combine, 1) : 0;
        item = __shfl_sync(0xFFFFFFFFu, item, 0);
        if (item >= num_items) return;
        if (item < num_row_items) {
            combine_rows(p, item / kGroups, item % kGroups * kWarpSize, done_blocks, report);
        } else {
            combine_tokens(p, (item - num_row_items) * kWarpSize, by_row);
        }
    }
}

}  // namespace mok
