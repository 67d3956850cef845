// What the GEMMs over row blocks share, in forward and backward.
#pragma once

#include "../../device/mma/sm90.cuh"
#include "../roles/load.cuh"
#include "readiness.cuh"

namespace mok {

template <TileKind kKind>
struct BlockOp {
    static __device__ __forceinline__ int column_tiles(MoeParams const& p, Task const& task) {
        SegmentParams const& segment = p.segments[task.segment];
        return kKind == TileKind::kFirst ? segment.first_tiles : segment.second_tiles;
    }
    static __device__ __forceinline__ Tile tile(MoeParams const& p, Task const& task, int cta_rank) {
        return tile_of_cta(task.num_rows, task.column, column_tiles(p, task), cta_rank);
    }
    static __device__ __forceinline__ bool is_idle(MoeParams const& p, Task const& task) {
        return is_idle_slot(task.num_rows, task.column, column_tiles(p, task));
    }
    static __device__ __forceinline__ uint32_t* done_counter(MoeParams const& p, Task const& task) {
        SegmentParams const& segment = p.segments[task.segment];
        return (kKind == TileKind::kFirst ? segment.first_done : segment.second_done) + task.block;
    }
    static __device__ __forceinline__ int row_info(MoeParams const&, Task const&, int) { return 0; }
};

// This lane's rows of a strip whose rows follow each other; only the first num_rows exist.
__device__ __forceinline__ RowPointers consecutive_rows(bf16* first, int64_t pitch, int num_rows) {
    RowPointers rows;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        rows.row[i] = strip_row(i) < num_rows ? first + strip_row(i) * pitch : nullptr;
    }
    return rows;
}

// A warp's 16 x 256 strip of the result, to columns from first_column on that are less than num_columns.
template <bool kStreaming>
__device__ __forceinline__ void store_accumulators(float const (&acc)[kAccumulators], uint32_t staging,
                                                   RowPointers const& rows, int first_column, int num_columns) {
#pragma unroll
    for (int first = 0; first < kTileColumns; first += kStripColumns) {
        constexpr int kPairs = kStripColumns / 4;
        uint32_t packed[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) packed[i] = pack_bf16(acc[first / 2 + 2 * i], acc[first / 2 + 2 * i + 1]);
        store_strip<kStreaming>(staging, packed, rows, first_column + first, num_columns);
    }
}

// Where the result of a route goes, by the row's information: its slot on the rank that owns the token, or the token's
// row of the shared segment.
struct RouteRows {
    static __device__ __forceinline__ int row_info(MoeParams const& p, Task const& task, int block_row) {
        int const row = task.first_row + block_row;
        return task.segment == kRoutedSegment ? p.row_route[row] : row;
    }
    // The owner of a route, whose number becomes the one that the owner knows it by.
    static __device__ __forceinline__ int owner_of(MoeParams const& p, int& route) {
        int const routes_per_rank = p.token_capacity * p.top_k;
        int const owner = p.world_size == 1 ? 0 : route / routes_per_rank;
        route -= owner * routes_per_rank;
        return owner;
    }
    static __device__ __forceinline__ bf16* output_row(MoeParams const& p, int segment, int info) {
        if (segment != kRoutedSegment) return p.shared_output + int64_t{info} * p.hidden;
        int const owner = owner_of(p, info);
        return p.route_output[owner] + int64_t{info} * p.hidden;
    }
    static __device__ __forceinline__ void store(MoeParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const& info) {
        RowPointers rows;
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            bool const is_row = warp_row + strip_row(i) < tile.num_rows;
            rows.row[i] = is_row ? output_row(p, task.segment, info.row[i]) : nullptr;
        }
        store_accumulators<true>(acc, staging, rows, tile.column * kTileColumns, p.hidden);
    }
};

}  // namespace mok
