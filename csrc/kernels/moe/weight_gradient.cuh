// The weight gradients of an expert: sums over its rows of outer products, both operands read as they lie, rows first.
#pragma once

#include "../../common/tensor_maps.h"
#include "block_op.cuh"

namespace mok {

// A task is a tile of the result for each CTA of the cluster, which share the tile of B: `block` and `column` say
// which, `ring_row` and `num_rows` are the rows to sum over (none: the result is zero).
struct WeightGradientOp {
    static constexpr int kBoxesA = kTileRows / kBoxRows;
    static constexpr int kBoxesB = kTileColumns / kBoxRows;

    static __device__ __forceinline__ int num_steps(BackwardParams const&, Task const& task) {
        return ceil_div(task.num_rows, kTileDepth);
    }
    static __device__ __forceinline__ bool is_idle(BackwardParams const&, Task const&) { return false; }
    static __device__ __forceinline__ uint32_t* done_counter(BackwardParams const&, Task const&) { return nullptr; }
    static __device__ __forceinline__ int row_info(BackwardParams const&, Task const&, int) { return 0; }

    // Rows are waited for block by block, once for all tasks of the cluster.
    static __device__ __forceinline__ void wait_ready(BackwardParams const& p, Task const& task, Progress& progress,
                                                      WaitReport const& report) {
        int& ready = progress.blocks[task.segment];
        for (; ready * kBlockRows < task.ring_row + task.num_rows; ++ready) {
            poll_first(p, task.segment, ready, report);
            if (task.segment != kRoutedSegment) continue;
            for (int stream = 0; stream < p.num_streams; ++stream) poll_gathered(p, stream, ready, report);
        }
    }

  protected:
    static __device__ __forceinline__ Tile make_tile(int first_row, int num_rows, int column) {
        int const rest = num_rows - first_row;
        return {first_row, rest < 0 ? 0 : min_int(rest, kTileRows), column, true};
    }

    static __device__ __forceinline__ void store_result(WeightGradient const& out, Task const& task, Tile const& tile,
                                                        float const (&acc)[kAccumulators], uint32_t staging,
                                                        int warp_row, int num_columns) {
        if (out.data == nullptr) return;
        int const first_column = tile.column * kTileColumns;
        int64_t const offset = task.expert * out.expert_stride + (tile.block_row + warp_row) * out.row_stride;
        int const num_rows = tile.num_rows - warp_row;
        if (out.mode == kWriteBf16) {
            RowPointers const rows = consecutive_rows(static_cast<bf16*>(out.data) + offset, out.row_stride, num_rows);
            store_accumulators<true>(acc, staging, rows, first_column, num_columns);
        } else if (out.mode == kAddBf16) {
            add_accumulators(static_cast<uint32_t*>(out.data), offset, out.row_stride, acc, num_rows, first_column,
                             num_columns);
        } else {
            add_accumulators(static_cast<float2*>(out.data), offset, out.row_stride, acc, num_rows, first_column,
                             num_columns);
        }
    }

  private:
    static __device__ __forceinline__ float2 add(float2 sum, float low, float high) {
        return make_float2(sum.x + low, sum.y + high);
    }
    static __device__ __forceinline__ uint32_t add(uint32_t sum, float low, float high) {
        float2 const values = unpack_bf16(sum);
        return pack_bf16(values.x + low, values.y + high);
    }

    // Adds straight from the registers, two columns at a time, rounded once.
    template <class Pair>
    static __device__ __forceinline__ void add_accumulators(Pair* data, int64_t offset, int64_t row_stride,
                                                            float const (&acc)[kAccumulators], int num_rows,
                                                            int first_column, int num_columns) {
        int const lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = lane / 4 + half * 8;
            if (row >= num_rows) continue;
            int64_t const first = offset + row * row_stride + first_column + lane % 4 * 2;
#pragma unroll
            for (int group = 0; group < kTileColumns / 8; ++group) {
                if (first_column + group * 8 >= num_columns) break;
                Pair& pair = data[(first + group * 8) / 2];
                pair = add(pair, acc[4 * group + 2 * half], acc[4 * group + 2 * half + 1]);
            }
        }
    }
};

// The first CTA of the cluster computes a tile of W_gate's gradient, the other the same tile of W_up's.
struct GateUpWeightGradient : WeightGradientOp {
    static __device__ __forceinline__ int row_tiles(BackwardParams const& p, int segment) {
        SegmentGradients const& out = p.gradients[segment];
        bool const is_wanted = out.gate.data != nullptr || out.up.data != nullptr;
        return is_wanted ? ceil_div(p.segments[segment].intermediate, kTileRows) : 0;
    }
    static __device__ __forceinline__ int num_tasks(BackwardParams const& p, int segment) {
        return row_tiles(p, segment) * ceil_div(p.hidden, kTileColumns);
    }

    static __device__ __forceinline__ Tile tile(BackwardParams const& p, Task const& task, int) {
        return make_tile(task.block * kTileRows, p.segments[task.segment].intermediate, task.column);
    }
    static __device__ __forceinline__ Box box_a(BackwardParams const&, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        CUtensorMap const* const map =
            ptx::cluster_ctarank() == 0 ? &maps.d_gate[task.segment] : &maps.d_up[task.segment];
        return {map, tile.block_row + i * kBoxRows, task.ring_row + depth, 0};
    }
    static __device__ __forceinline__ Box box_b(BackwardParams const&, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        return {&maps.input[task.segment], tile.column * kTileColumns + i * kBoxRows, task.ring_row + depth, 0};
    }
    static __device__ __forceinline__ void store(BackwardParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const&) {
        SegmentGradients const& out = p.gradients[task.segment];
        store_result(ptx::cluster_ctarank() == 0 ? out.gate : out.up, task, tile, acc, staging, warp_row, p.hidden);
    }
};

// The CTAs of the cluster compute row tiles that follow each other.
struct DownWeightGradient : WeightGradientOp {
    static __device__ __forceinline__ int row_tiles(BackwardParams const& p, int segment) {
        return p.gradients[segment].down.data != nullptr ? ceil_div(p.hidden, kBlockRows) : 0;
    }
    static __device__ __forceinline__ int num_tasks(BackwardParams const& p, int segment) {
        return row_tiles(p, segment) * ceil_div(p.segments[segment].intermediate, kTileColumns);
    }

    static __device__ __forceinline__ Tile tile(BackwardParams const& p, Task const& task, int cta_rank) {
        return make_tile(task.block * kBlockRows + cta_rank * kTileRows, p.hidden, task.column);
    }
    static __device__ __forceinline__ Box box_a(BackwardParams const&, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        return {&maps.d_output[task.segment], tile.block_row + i * kBoxRows, task.ring_row + depth, 0};
    }
    static __device__ __forceinline__ Box box_b(BackwardParams const&, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        return {&maps.activation[task.segment], tile.column * kTileColumns + i * kBoxRows, task.ring_row + depth, 0};
    }
    static __device__ __forceinline__ void store(BackwardParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const&) {
        store_result(p.gradients[task.segment].down, task, tile, acc, staging, warp_row,
                     p.segments[task.segment].intermediate);
    }
};

}  // namespace mok
