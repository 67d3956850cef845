// The order in which the persistent kernel visits its GEMM tiles: one object, used by every role on the device and by
// the CPU tests.
#pragma once

#ifdef __CUDACC__
#define MOK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOK_HOST_DEVICE inline
#endif

namespace mok {

MOK_HOST_DEVICE int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}
MOK_HOST_DEVICE int min_int(int a, int b) {
    return a < b ? a : b;
}

// Gate+up tiles write the activation rows of a block, down tiles read them.
enum class TileKind : int { kGateUp = 0, kDown = 1 };

struct TilePosition {
    TileKind kind;
    int block;   // row block, in schedule order
    int column;  // column tile of the GEMM
};

// The tiles of one segment (the shared expert, or all routed experts) of `num_blocks` row blocks.
//
// Blocks are taken in chunks: GU(0) GU(1) D(0) GU(2) D(1) ... GU(n-1) D(n-2) D(n-1). A down tile therefore starts at
// least one whole chunk of gate+up tiles after the tiles that it reads, so it never waits in practice, yet soon enough
// to find the activation in L2. Inside a chunk the column is the outer loop: workers that run side by side share the
// weight tile.
struct TaskOrder {
    int num_blocks;
    int chunk_blocks;
    int group_blocks;
    int gate_up_tiles;  // column tiles of the gate+up GEMM
    int down_tiles;     // column tiles of the down GEMM

    MOK_HOST_DEVICE int num_chunks() const { return ceil_div(num_blocks, chunk_blocks); }
    MOK_HOST_DEVICE int num_tasks() const { return num_blocks * (gate_up_tiles + down_tiles); }
    MOK_HOST_DEVICE int blocks_in_chunk(int chunk) const {
        return min_int(chunk_blocks, num_blocks - chunk * chunk_blocks);
    }

    MOK_HOST_DEVICE TilePosition at(int task) const {
        int const head = blocks_in_chunk(0) * gate_up_tiles;
        if (task < head) return tile_in_chunk(TileKind::kGateUp, 0, task);
        // Then sections GU(c + 1) D(c), all equally long but the last two, whose gate+up chunk is shorter or missing.
        int const section_tiles = chunk_blocks * (gate_up_tiles + down_tiles);
        int const last_full = num_chunks() > 1 ? num_chunks() - 2 : 0;
        int chunk = min_int((task - head) / section_tiles, last_full);
        int offset = task - head - chunk * section_tiles;
        if (offset >= gate_up_in_section(chunk) + blocks_in_chunk(chunk) * down_tiles) {
            offset -= gate_up_in_section(chunk) + blocks_in_chunk(chunk) * down_tiles;
            ++chunk;
        }
        if (offset < gate_up_in_section(chunk)) return tile_in_chunk(TileKind::kGateUp, chunk + 1, offset);
        return tile_in_chunk(TileKind::kDown, chunk, offset - gate_up_in_section(chunk));
    }

  private:
    MOK_HOST_DEVICE int gate_up_in_section(int chunk) const {
        return chunk + 1 < num_chunks() ? blocks_in_chunk(chunk + 1) * gate_up_tiles : 0;
    }
    MOK_HOST_DEVICE TilePosition tile_in_chunk(TileKind kind, int chunk, int offset) const {
        int const tiles = kind == TileKind::kGateUp ? gate_up_tiles : down_tiles;
        int const first = offset / (group_blocks * tiles) * group_blocks;
        int const blocks = min_int(group_blocks, blocks_in_chunk(chunk) - first);
        int const in_group = offset - first * tiles;
        return {kind, chunk * chunk_blocks + first + in_group % blocks, in_group / blocks};
    }
};

}  // namespace mok
