// Where rows lie, and when they are ready.
#pragma once

#include "../../common/params.h"
#include "../../device/epilogue/store_rows.cuh"
#include "../tile_task.cuh"

namespace mok {

// Routed blocks of this launch.
__device__ __forceinline__ int num_routed_blocks(MoeParams const& p) {
    int const rest = *p.num_routed_blocks - p.first_block;
    return rest < 0 ? 0 : min_int(rest, p.most_blocks);
}

__device__ __forceinline__ int rows_of_block(MoeParams const& p, int segment, int block) {
    if (segment == kSharedSegment) return min_int(kBlockRows, p.num_tokens - block * kBlockRows);
    return p.blocks[block].num_rows;
}

// Rows of the routed segment's buffers that hold a block's or a tile's rows: those that pad it hold zeros.
__device__ __forceinline__ int padded_rows(MoeParams const& p, int num_rows) {
    return p.zero_row == nullptr ? num_rows : ceil_div(num_rows, kTileDepth) * kTileDepth;
}

// First row of a block in the rings.
__device__ __forceinline__ int ring_row(SegmentParams const& segment, int block) {
    return block % segment.ring_blocks * kBlockRows;
}

// What one scheduler has already seen to be ready: blocks of each segment, from the first on.
struct Progress {
    int blocks[2];
};

// What an op's epilogue must know of the rows that a lane stores, looked up before the multiplication.
struct RowInfo {
    int row[kRowsPerLane];
};

// Waits until a block's first GEMM is stored, for what reads the result.
__device__ __forceinline__ void poll_first(MoeParams const& p, int segment, int block, WaitReport const& report) {
    SegmentParams const& s = p.segments[segment];
    poll_at_least(&s.first_done[block], stores_of_block(rows_of_block(p, segment, block), s.first_tiles),
                  kFirstGemmTimeout, block, report);
}

__device__ __forceinline__ void poll_gathered(MoeParams const& p, int stream, int block, WaitReport const& report) {
    poll_at_least(&p.streams[stream].gathered[block], padded_rows(p, p.blocks[block].num_rows), kGatherTimeout, block,
                  report);
}

// Waits until every block up to `block` of a segment has its second GEMM stored; a whole warp looks at 32 blocks at a
// time.
__device__ __forceinline__ void wait_second(MoeParams const& p, int segment, int& done_blocks, int block,
                                            WaitReport const& report) {
    int const lane = threadIdx.x % kWarpSize;
    SegmentParams const& s = p.segments[segment];
    for (; done_blocks <= block; done_blocks += kWarpSize) {
        int const mine = done_blocks + lane;
        if (mine <= block) {
            wait_at_least(&s.second_done[mine], stores_of_block(rows_of_block(p, segment, mine), s.second_tiles),
                          kCombineTimeout, mine, report);
        }
    }
    done_blocks = block + 1;
    __syncwarp();
}

}  // namespace mok
