// activation = silu(x W_gate^T) * (x W_up^T): one tile holds 128 gate columns and the 128 matching up columns.
#pragma once

#include "../../device/epilogue/swiglu.cuh"
#include "readiness.cuh"

namespace mok {

struct WeightHalf {
    CUtensorMap const* map;
    int row;
};

struct GateUp {
    static __device__ __forceinline__ int column_tiles(ForwardParams const& p, Task const& task) {
        return p.segments[task.segment].gate_up_tiles;
    }
    static __device__ __forceinline__ int depth(ForwardParams const& p, Task const&) { return p.hidden; }

    static __device__ __forceinline__ void wait_ready(ForwardParams const& p, Task const& task,
                                                      WaitReport const& report) {
        SegmentParams const& segment = p.segments[task.segment];
        int const previous = task.block - segment.ring_blocks;
        if (previous >= 0) {
            poll_at_least(&segment.down_done[previous],
                          stores_of_block(rows_of_block(p, task.segment, previous), segment.down_tiles), kRingTimeout,
                          previous, report);
        }
        if (task.segment == kRoutedSegment) {
            poll_at_least(&p.gathered[task.block], task.num_rows, kGatherTimeout, task.block, report);
        }
    }

    static __device__ __forceinline__ CUtensorMap const* input_map(TensorMaps const& maps, int segment) {
        return &maps.input[segment];
    }
    static __device__ __forceinline__ int input_row(Task const& task) {
        return task.segment == kRoutedSegment ? task.ring_row : task.first_row;
    }

    static __device__ __forceinline__ WeightHalf weight_half(TensorMaps const& maps, int segment, int column,
                                                             int half) {
        return {half == 0 ? &maps.gate[segment] : &maps.up[segment], column * kGateUpColumns};
    }

    static __device__ __forceinline__ void store(ForwardParams const& p, Task const& task, Tile const& tile,
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
        if (segment.gate_up != nullptr) {
            int64_t const first_row = int64_t{task.first_row} + tile.block_row + warp_row;
            int const num_rows = min_int(tile.num_rows - warp_row, static_cast<int>(segment.gate_up_rows - first_row));
            int const pitch = 2 * segment.intermediate;
            RowPointers const saved = consecutive_rows(segment.gate_up + first_row * pitch, pitch, num_rows);
            store_strips<true>(staging, gate, saved, first_column, segment.intermediate);
            store_strips<true>(staging, up, saved, segment.intermediate + first_column, pitch);
        }
        if (p.swiglu_limit < INFINITY) {
            swiglu_pairs<true>(gate, up, p.swiglu_limit);
        } else {
            swiglu_pairs<false>(gate, up, p.swiglu_limit);
        }
        int64_t const first_row = task.ring_row + tile.block_row + warp_row;
        RowPointers const rows = consecutive_rows(segment.activation + first_row * segment.intermediate,
                                                  segment.intermediate, tile.num_rows - warp_row);
        store_strips<false>(staging, gate, rows, first_column, segment.intermediate);
    }

  private:
    // This lane's rows of a strip whose rows follow each other; only the first num_rows exist.
    static __device__ __forceinline__ RowPointers consecutive_rows(bf16* first, int pitch, int num_rows) {
        RowPointers rows;
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            rows.row[i] = strip_row(i) < num_rows ? first + int64_t{strip_row(i)} * pitch : nullptr;
        }
        return rows;
    }
};

}  // namespace mok
