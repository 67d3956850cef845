// Publishes this rank's tokens to its peers and pulls the tokens that its experts need, each once.
#pragma once

#include "rank_barrier.cuh"
#include "readiness.cuh"

namespace mok {

// Copies one row with a warp, eight 16-byte loads a lane in flight.
__device__ __forceinline__ void copy_row(bf16* destination, bf16 const* source, int num_columns) {
    constexpr int kBatch = 8;
    int const lane = threadIdx.x % kWarpSize;
    for (int begin = lane * 8; begin < num_columns; begin += kBatch * kWarpSize * 8) {
        int4 values[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int const column = begin + i * kWarpSize * 8;
            if (column < num_columns) values[i] = ptx::ld_global_v4(source + column);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int const column = begin + i * kWarpSize * 8;
            if (column < num_columns) ptx::st_global_v4(destination + column, values[i]);
        }
    }
}

// `worker` of `num_workers` background warps of the grid.
__device__ __forceinline__ void publish_tokens(ForwardParams const& p, int worker, int num_workers) {
    for (int token = worker; token < p.num_tokens; token += num_workers) {
        int64_t const offset = int64_t{token} * p.hidden;
        copy_row(p.published_x[p.rank] + offset, p.x + offset, p.hidden);
    }
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) ptx::red_release_gpu_add(&p.counters->published_warps, 1);
}

__device__ __forceinline__ void pull_rows(ForwardParams const& p, BlockEntry const& block, int block_row) {
    int const lane = threadIdx.x % kWarpSize;
    int const row = block.first_row + block_row + lane;
    bool const is_row = block_row + lane < block.num_rows;
    int const token = is_row && p.row_pull[row] ? p.row_route[row] / p.top_k : -1;
    for (uint32_t pending = __ballot_sync(0xFFFFFFFFu, token >= 0); pending != 0; pending &= pending - 1) {
        int const pulled = __shfl_sync(0xFFFFFFFFu, token, __ffs(pending) - 1);
        int const source = pulled / p.token_capacity;
        bf16 const* const from = p.published_x[source] + int64_t{pulled - source * p.token_capacity} * p.hidden;
        copy_row(p.landing + int64_t{pulled} * p.hidden, from, p.hidden);
    }
}

// Pulls in the order in which the GEMMs will ask.
__device__ __forceinline__ void pull_tokens(ForwardParams const& p) {
    constexpr int kGroups = kBlockRows / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    int const num_items = *p.num_routed_blocks * kGroups;
    for (;;) {
        int item = lane == 0 ? ptx::atom_relaxed_gpu_add(&p.counters->next_dispatch, 1) : 0;
        item = __shfl_sync(0xFFFFFFFFu, item, 0);
        if (item >= num_items) return;
        BlockEntry const block = p.blocks[item / kGroups];
        int const block_row = item % kGroups * kWarpSize;
        if (block_row >= block.num_rows) continue;
        pull_rows(p, block, block_row);
        __syncwarp();
        if (lane == 0) {
            ptx::red_release_gpu_add(&p.landed[item / kGroups], min_int(kWarpSize, block.num_rows - block_row));
        }
    }
}

}  // namespace mok
