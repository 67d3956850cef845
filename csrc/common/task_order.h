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

// A block has two GEMMs, the second on what the first one stores: gate+up and down in forward.
enum class TileKind : int { kFirst = 0, kSecond = 1 };

struct TilePosition {
    TileKind kind;
    int block;   // row block, in schedule order
    int column;  // column tile of the GEMM
};

// The tiles of one segment (the shared expert, or all routed experts) of `num_blocks` row blocks.
//
// Blocks are taken in chunks: F(0) F(1) S(0) F(2) S(1) ... F(n-1) S(n-2) S(n-1). A tile of the second GEMM therefore
// starts at least one whole chunk of first tiles after those that it reads, so it never waits in practice, yet soon
// enough to find their result in L2. Inside a chunk the column is the outer loop: workers that run side by side share
// the weight tile.
struct TaskOrder {
    int num_blocks;
    int chunk_blocks;
    int group_blocks;
    int first_tiles;   // column tiles of the first GEMM
    int second_tiles;  // column tiles of the second GEMM, 0 if there is none

    MOK_HOST_DEVICE int num_chunks() const { return ceil_div(num_blocks, chunk_blocks); }
    MOK_HOST_DEVICE int num_tasks() const { return num_blocks * (first_tiles + second_tiles); }
    MOK_HOST_DEVICE int blocks_in_chunk(int chunk) const {
        return min_int(chunk_blocks, num_blocks - chunk * chunk_blocks);
    }

    MOK_HOST_DEVICE TilePosition at(int task) const {
        int const head = blocks_in_chunk(0) * first_tiles;
        if (task < head) return tile_in_chunk(TileKind::kFirst, 0, task);
        // Then sections F(c + 1) S(c), all equally long but the last two, whose first chunk is shorter or missing.
        int const section_tiles = chunk_blocks * (first_tiles + second_tiles);
        int const last_full = num_chunks() > 1 ? num_chunks() - 2 : 0;
        int chunk = min_int((task - head) / section_tiles, last_full);
        int offset = task - head - chunk * section_tiles;
        if (offset >= first_in_section(chunk) + blocks_in_chunk(chunk) * second_tiles) {
            offset -= first_in_section(chunk) + blocks_in_chunk(chunk) * second_tiles;
            ++chunk;
        }
        if (offset < first_in_section(chunk)) return tile_in_chunk(TileKind::kFirst, chunk + 1, offset);
        return tile_in_chunk(TileKind::kSecond, chunk, offset - first_in_section(chunk));
    }

  private:
    MOK_HOST_DEVICE int first_in_section(int chunk) const {
        return chunk + 1 < num_chunks() ? blocks_in_chunk(chunk + 1) * first_tiles : 0;
    }
    MOK_HOST_DEVICE TilePosition tile_in_chunk(TileKind kind, int chunk, int offset) const {
        int const tiles = kind == TileKind::kFirst ? first_tiles : second_tiles;
        int const first = offset / (group_blocks * tiles) * group_blocks;
        int const blocks = min_int(group_blocks, blocks_in_chunk(chunk) - first);
        int const in_group = offset - first * tiles;
        return {kind, chunk * chunk_blocks + first + in_group % blocks, in_group / blocks};
    }
};

}  // namespace mok
