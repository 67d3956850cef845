// Where rows lie, and when they are ready.
#pragma once

#include "../../common/params.h"
#include "../../common/tensor_maps.h"
#include "../../device/epilogue/store_rows.cuh"
#include "../tile_task.cuh"

namespace mok {

__device__ __forceinline__ int rows_of_block(ForwardParams const& p, int segment, int block) {
    if (segment == kSharedSegment) return min_int(kBlockRows, p.num_tokens - block * kBlockRows);
    return p.blocks[block].num_rows;
}

// First row of a block in the rings.
__device__ __forceinline__ int ring_row(SegmentParams const& segment, int block) {
    return block % segment.ring_blocks * kBlockRows;
}

// What an op's epilogue must know of the rows that a lane stores, looked up before the multiplication.
struct RowInfo {
    int row[kRowsPerLane];
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
