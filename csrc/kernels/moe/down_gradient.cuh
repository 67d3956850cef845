// p = d_output W_down, and from it, g and u: the gradients of gate and up, w a for the gradient of W_down, and the
// tile's part of the router gradient <p, a>.
#pragma once

#include "../../common/tensor_maps.h"
#include "../../device/epilogue/swiglu.cuh"
#include "block_op.cuh"

namespace mok {

struct DownGradient : BlockOp<TileKind::kFirst> {
    static constexpr int kBoxesA = kTileRows / kBoxRows;
    static constexpr int kBoxesB = kTileColumns / kBoxRows;

    static __device__ __forceinline__ int num_steps(BackwardParams const& p, Task const&) {
        return ceil_div(p.hidden, kTileDepth);
    }
    static __device__ __forceinline__ Box box_a(BackwardParams const&, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        return {&maps.d_output[task.segment], depth, task.ring_row + tile.block_row + i * kBoxRows, 0};
    }
    static __device__ __forceinline__ Box box_b(BackwardParams const&, BackwardMaps const& maps, Task const& task,
                                                Tile const& tile, int depth, int i) {
        return {&maps.down[task.segment], tile.column * kTileColumns + i * kBoxRows, depth, task.expert};
    }

    static __device__ __forceinline__ void wait_ready(BackwardParams const& p, Task const& task, Progress&,
                                                      WaitReport const& report) {
        if (task.segment == kRoutedSegment) poll_gathered(p, 0, task.block, report);
    }

    // The bits of the row's router weight.
    static __device__ __forceinline__ int row_info(BackwardParams const& p, Task const& task, int block_row) {
        if (task.segment != kRoutedSegment) return __float_as_int(1.0f);
        int route = p.row_route[task.first_row + block_row];
        int const owner = RouteRows::owner_of(p, route);
        return __float_as_int(p.router_weights[owner][route]);
    }

    static __device__ __forceinline__ void store(BackwardParams const& p, Task const& task, Tile const& tile,
                                                 float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                 RowInfo const& info) {
        if (p.swiglu_limit < INFINITY) {
            store_tile<true>(p, task, tile, acc, staging, warp_row, info);
        } else {
            store_tile<false>(p, task, tile, acc, staging, warp_row, info);
        }
    }

  private:
    struct Pieces {  // eight columns of a row
        int4 d_gate, d_up, activation;
        float d_weight;
    };

    template <bool kClamped>
    static __device__ __forceinline__ Pieces swiglu_gradient(int4 const& projected, int4 const& gate, int4 const& up,
                                                             float weight, float limit) {
        uint32_t const* const p = reinterpret_cast<uint32_t const*>(&projected);
        uint32_t const* const g = reinterpret_cast<uint32_t const*>(&gate);
        uint32_t const* const u = reinterpret_cast<uint32_t const*>(&up);
        Pieces out;
        out.d_weight = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 const p2 = unpack_bf16(p[i]), g2 = unpack_bf16(g[i]), u2 = unpack_bf16(u[i]);
            SwigluSlopes const low = swiglu_slopes<kClamped>(g2.x, u2.x, limit);
            SwigluSlopes const high = swiglu_slopes<kClamped>(g2.y, u2.y, limit);
            float2 const d_activation = make_float2(p2.x * weight, p2.y * weight);
            out.d_weight = fmaf(p2.x, low.activation, out.d_weight);
            out.d_weight = fmaf(p2.y, high.activation, out.d_weight);
            reinterpret_cast<uint32_t*>(&out.d_gate)[i] =
                pack_bf16(d_activation.x * low.by_gate, d_activation.y * high.by_gate);
            reinterpret_cast<uint32_t*>(&out.d_up)[i] =
                pack_bf16(d_activation.x * low.by_up, d_activation.y * high.by_up);
            reinterpret_cast<uint32_t*>(&out.activation)[i] =
                pack_bf16(low.activation * weight, high.activation * weight);
        }
        return out;
    }

    template <bool kClamped>
    static __device__ __forceinline__ void store_tile(BackwardParams const& p, Task const& task, Tile const& tile,
                                                      float const (&acc)[kAccumulators], uint32_t staging, int warp_row,
                                                      RowInfo const& info) {
        SegmentParams const& segment = p.segments[task.segment];
        SegmentGradients const& out = p.gradients[task.segment];
        int const width = segment.intermediate;
        int const tile_row = tile.block_row + warp_row;
        int64_t const buffer_row = task.ring_row + tile_row;
        int64_t const saved_row = (segment.gate_up_in_blocks ? task.block * kBlockRows : task.first_row) + tile_row;
        int const num_rows = tile.num_rows - warp_row;
        // The weight gradients sum over whole steps of rows: those that pad the last one are zero.
        int const stored_rows =
            (task.segment == kRoutedSegment ? padded_rows(p, tile.num_rows) : tile.num_rows) - warp_row;
        float d_weight[kRowsPerLane] = {};
#pragma unroll
        for (int strip = 0; strip < kTileColumns; strip += kStripColumns) {
            constexpr int kPairs = kStripColumns / 4;
            uint32_t packed[kPairs];
#pragma unroll
            for (int i = 0; i < kPairs; ++i) packed[i] = pack_bf16(acc[strip / 2 + 2 * i], acc[strip / 2 + 2 * i + 1]);
            int const column = tile.column * kTileColumns + strip + threadIdx.x % kLanesPerRow * 8;
            bool const is_column = column < width;
            int4 gate[kRowsPerLane] = {}, up[kRowsPerLane] = {};
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                if (strip_row(i) >= num_rows || !is_column) continue;
                bf16 const* const saved = segment.gate_up + (saved_row + strip_row(i)) * (2 * width) + column;
                gate[i] = ptx::ld_global_v4(saved, ptx::createpolicy_evict_first());
                up[i] = ptx::ld_global_v4(saved + width, ptx::createpolicy_evict_first());
            }
            stage_strip(staging, packed);
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                int4 const projected = staged_row(staging, i);
                if (strip_row(i) >= stored_rows || !is_column) continue;
                bool const is_row = strip_row(i) < num_rows;
                float const weight = is_row ? __int_as_float(info.row[i]) : 0.0f;
                Pieces pieces = swiglu_gradient<kClamped>(projected, gate[i], up[i], weight, p.swiglu_limit);
                if (!is_row) pieces = {};
                d_weight[i] += pieces.d_weight;
                int64_t const row = buffer_row + strip_row(i);
                if (out.d_gate_up != nullptr) {
                    ptx::st_global_v4(out.d_gate_up + row * (2 * width) + column, pieces.d_gate);
                    ptx::st_global_v4(out.d_gate_up + row * (2 * width) + width + column, pieces.d_up);
                }
                if (out.activation != nullptr) {
                    ptx::st_global_v4(out.activation + row * width + column, pieces.activation);
                }
            }
            __syncwarp();
        }
        if (out.d_weight_parts == nullptr) return;
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            float sum = d_weight[i];
#pragma unroll
            for (int offset = 1; offset < kLanesPerRow; offset *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
            if (threadIdx.x % kLanesPerRow == 0 && strip_row(i) < num_rows) {
                out.d_weight_parts[(buffer_row + strip_row(i)) * segment.first_tiles + tile.column] = sum;
            }
        }
    }
};

}  // namespace mok
