// activation = silu(x W_gate^T) * (x W_up^T): one tile holds 128 gate columns and the 128 matching up columns.
#pragma once

#include "../../common/tensor_maps.h"
#include "../../device/epilogue/swiglu.cuh"
#include "block_op.cuh"

namespace mok {

struct GateUp : BlockOp<TileKind::kFirst> {
    static constexpr int kBoxesA = 1;
    static constexpr int kBoxesB = 2;

    static __device__ __forceinline__ int num_steps(MoeParams const& p, Task const&) {
        return ceil_div(p.hidden, kTileDepth);
    }
    static __device__ __forceinline__ Box box_a(MoeParams const&, ForwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int) {
        int const first_row = task.segment == kRoutedSegment ? task.ring_row : task.first_row;
        return {&maps.input[task.segment], depth, first_row + tile.block_row, 0};
    }
    static __device__ __forceinline__ Box box_b(MoeParams const&, ForwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int half) {
        CUtensorMap const* const map = half == 0 ? &maps.gate[task.segment] : &maps.up[task.segment];
        return {map, depth, tile.column * kGateUpColumns, task.expert};
    }

    static __device__ __forceinline__ void wait_ready(MoeParams const& p, Task const& task, Progress&,
                                                      WaitReport const& report) {
        SegmentParams const& segment = p.segments[task.segment];
        int const previous = task.block - segment.ring_blocks;
        if (previous >= 0) {
            poll_at_least(&segment.second_done[previous],
                          stores_of_block(rows_of_block(p, task.segment, previous), segment.second_tiles), kRingTimeout,
                          previous, report);
        }
        if (task.segment == kRoutedSegment) poll_gathered(p, 0, task.block, report);
    }

    static __device__ __forceinline__ void store(MoeParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const&) {
        SegmentParams const& segment = p.segments[task.segment];
        int const first_column = tile.column * kGateUpColumns;
        constexpr int kPairs = kAccumulators / 4;  // bf16 pairs of gate, and as many of up
        uint32_t gate[kPairs], up[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            gate[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
            up[i] = pack_bf16(acc[2 * (kPairs + i)], acc[2 * (kPairs + i) + 1]);
            asm volatile("" : "+r"(gate[i]), "+r"(up[i]));  // pack all now, which frees the accumulators' registers
        }
        int const tile_row = tile.block_row + warp_row;
        if (segment.gate_up != nullptr) {
            int64_t const first_row =
                int64_t{segment.gate_up_in_blocks ? task.block * kBlockRows : task.first_row} + tile_row;
            int const num_rows = min_int(tile.num_rows - warp_row, static_cast<int>(segment.gate_up_rows - first_row));
            int const pitch = 2 * segment.intermediate;
            RowPointers const saved = consecutive_rows(segment.gate_up + first_row * pitch, pitch, num_rows);
            store_strips<true>(staging, gate, saved, first_column, segment.intermediate);
            store_strips<true>(staging, up, saved, segment.intermediate + first_column, pitch);
        }
        if (segment.activation == nullptr) return;
        if (p.swiglu_limit < INFINITY) {
            swiglu_pairs<true>(gate, up, p.swiglu_limit);
        } else {
            swiglu_pairs<false>(gate, up, p.swiglu_limit);
        }
        int64_t const first_row = task.ring_row + tile_row;
        RowPointers const rows = consecutive_rows(segment.activation + first_row * segment.intermediate,
                                                  segment.intermediate, tile.num_rows - warp_row);
        store_strips<false>(staging, gate, rows, first_column, segment.intermediate);
    }
};

}  // namespace mok
