// One unit of GEMM work, decoded once by the scheduler warp and read by every role.
#pragma once

#include "../common/task_order.h"
#include "../device/sync/pipeline.cuh"

namespace mok {

constexpr int kLastTask = -1;

struct alignas(16) Task {
    int32_t kind;     // TileKind, one of the program's further kinds, or kLastTask
    int32_t segment;  // 0 shared expert, 1 routed experts
    int32_t block;    // in the segment
    int32_t column;   // column slot of the cluster
    int32_t expert;
    int32_t first_row;  // of the block, in the segment's rows
    int32_t num_rows;   // of the block
    int32_t ring_row;   // of the block, in the segment's rings
};

// This CTA's share of a task. A block of more than kTileRows rows is split by rows: both CTAs use the same weights, so
// each loads half and multicasts it. A smaller block is split by columns, so that the second CTA has work and no row is
// computed twice.
struct Tile {
    int block_row;  // first row inside the block
    int num_rows;   // 0: nothing to store
    int column;     // column tile
    bool multicast;
};

MOK_HOST_DEVICE bool splits_rows(int num_rows) {
    return num_rows > kTileRows;
}

MOK_HOST_DEVICE Tile tile_of_cta(int num_rows, int column_slot, int num_column_tiles, int cta_rank) {
    if (splits_rows(num_rows)) {
        int const block_row = cta_rank * kTileRows;
        return {block_row, min_int(num_rows - block_row, kTileRows), column_slot, true};
    }
    int const column = column_slot * kClusterSize + cta_rank;
    return {0, column < num_column_tiles ? num_rows : 0, column, false};
}

// A column slot with nothing to do: the columns of a small block are spread over the CTAs of the cluster.
MOK_HOST_DEVICE bool is_idle_slot(int num_rows, int column_slot, int num_column_tiles) {
    return !splits_rows(num_rows) && column_slot * kClusterSize >= num_column_tiles;
}

// What a block's counter holds when all of its tiles are stored: every warp of the MMA role counts once a tile.
constexpr int kMmaWarpgroups = kTileRows / 64;
constexpr int kMmaWarps = kMmaWarpgroups * kWarpgroupThreads / kWarpSize;
MOK_HOST_DEVICE uint32_t stores_of_block(int num_rows, int num_column_tiles) {
    return num_column_tiles * kMmaWarps * (splits_rows(num_rows) ? kClusterSize : 1);
}

// The slot is free again when all have read the task in work, so the load role still runs one task ahead. Taking more
// would bind tasks to a cluster before it is clear which is free first, while others wait for their results.
constexpr int kTaskSlots = 1;

}  // namespace mok
