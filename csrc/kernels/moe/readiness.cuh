// Where rows lie, and when they are ready.
#pragma once

#include "../../common/params.h"
#include "../tile_task.cuh"

namespace mok {

__device__ __forceinline__ int rows_of_block(ForwardParams const& p, int segment, int block) {
    if (segment == kSharedSegment) return min_int(kBlockRows, p.num_tokens - block * kBlockRows);
    return p.blocks[block].num_rows;
}

__device__ __forceinline__ bf16* activation_row(SegmentParams const& segment, int block, int block_row) {
    int const slot = block % segment.ring_blocks;
    return segment.activation + (int64_t{slot} * kBlockRows + block_row) * segment.intermediate;
}

// How far a warp has already looked; blocks become ready nearly in order, so each block is looked at once.
struct Readiness {
    int landed_blocks = 0;

    // A row's token may have been pulled for an earlier row, so all earlier blocks count too.
    __device__ __forceinline__ void wait_landed(ForwardParams const& p, int block, WaitReport const& report) {
        for (; landed_blocks <= block; ++landed_blocks) {
            wait_at_least(&p.landed[landed_blocks], p.blocks[landed_blocks].num_rows, kDispatchTimeout, landed_blocks,
                          report);
        }
    }
};

// Waits until every block up to `block` of a segment has its down tiles stored; a whole warp looks at 32 blocks at a
// time.
__device__ __forceinline__ void wait_down(ForwardParams const& p, int segment, int& done_blocks, int block,
                                          WaitReport const& report) {
    int const lane = threadIdx.x % kWarpSize;
    SegmentParams const& s = p.segments[segment];
    for (; done_blocks <= block; done_blocks += kWarpSize) {
        int const mine = done_blocks + lane;
        if (mine <= block) {
            wait_at_least(&s.down_done[mine], stores_of_block(rows_of_block(p, segment, mine), s.down_tiles),
                          kCombineTimeout, mine, report);
        }
    }
    done_blocks = block + 1;
    __syncwarp();
}

}  // namespace mok
