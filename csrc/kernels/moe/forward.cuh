// The forward program: which ops the tiles run, and what the background warps do.
#pragma once

#include "../persistent.cuh"
#include "combine.cuh"
#include "dispatch.cuh"
#include "down.cuh"

namespace mok {

// All tasks of a launch: the shared expert's first, so that they hide the arrival of the first tokens.
struct ForwardTasks {
    ForwardParams const& p;
    TaskOrder order[2];

    __device__ __forceinline__ Task decode(int index) const {
        int const num_shared = order[0].num_tasks();
        int const segment = index < num_shared ? kSharedSegment : kRoutedSegment;
        int const offset = segment == kSharedSegment ? index : index - num_shared;
        if (offset >= order[segment].num_tasks()) return {kLastTask};
        TilePosition const tile = order[segment].at(offset);
        BlockEntry entry = {0, tile.block * kBlockRows, rows_of_block(p, segment, tile.block)};
        if (segment == kRoutedSegment) entry = p.blocks[tile.block];
        return {static_cast<int>(tile.kind),
                segment,
                tile.block,
                tile.column,
                entry.expert,
                entry.first_row,
                entry.num_rows};
    }
};

struct Forward {
    using Params = ForwardParams;
    using TensorMaps = mok::TensorMaps;
    using Readiness = mok::Readiness;

    template <class Visitor>
    static __device__ __forceinline__ void with_op(int kind, Visitor visit) {
        if (kind == static_cast<int>(TileKind::kGateUp)) {
            visit(GateUp{});
        } else {
            visit(Down{});
        }
    }
    static __device__ __forceinline__ bool is_gate_up(Task const& task) {
        return task.kind == static_cast<int>(TileKind::kGateUp);
    }
    static __device__ __forceinline__ int column_tiles(Params const& p, Task const& task) {
        return is_gate_up(task) ? GateUp::column_tiles(p, task) : Down::column_tiles(p, task);
    }
    static __device__ __forceinline__ int depth(Params const& p, Task const& task) {
        return is_gate_up(task) ? GateUp::depth(p, task) : Down::depth(p, task);
    }
    static __device__ __forceinline__ int row_info(Params const& p, Task const& task, Tile const& tile, int row) {
        return is_gate_up(task) || row >= tile.num_rows ? 0 : Down::row_info(p, task, tile.block_row + row);
    }

    static __device__ __forceinline__ WaitReport report(Params const& p) {
        return {p.error, &p.counters->error_claims, p.timeout_ns, p.rank};
    }

    static __device__ __forceinline__ TaskOrder task_order(SegmentParams const& s, int num_blocks) {
        return {num_blocks, s.chunk_blocks, s.gate_up_tiles, s.down_tiles};
    }
    static __device__ __forceinline__ ForwardTasks tasks(Params const& p) {
        return {p,
                {task_order(p.segments[0], p.gemm ? p.num_shared_blocks : 0),
                 task_order(p.segments[kRoutedSegment], p.gemm ? *p.num_routed_blocks : 0)}};
    }

    // The helper warps that neither load nor schedule: communication, then the weighted sum.
    static __device__ __forceinline__ void background(Params const& p, int warp) {
        int const worker = blockIdx.x * kBackgroundWarps + warp;
        int const num_workers = gridDim.x * kBackgroundWarps;
        if (p.publish) {
            publish_tokens(p, worker, num_workers);
            meet(p, worker == 0, 0, &p.counters->published_warps, num_workers);
        }
        if (p.gemm && p.world_size > 1) pull_tokens(p);
        if (p.combine) {
            meet(p, worker == 0, 1, &p.counters->gemm_finished_warps, gridDim.x * kMmaWarps);
            combine(p, report(p));
        }
    }

    // The MMA warps, when no tile is left, help with what remains of the sum.
    static __device__ __forceinline__ void after_gemm(Params const& p) {
        if (p.device_barriers) {
            __syncwarp();
            if (threadIdx.x % kWarpSize == 0) ptx::red_release_gpu_add(&p.counters->gemm_finished_warps, 1);
        }
        if (p.combine && p.world_size == 1) combine(p, report(p));
    }

  private:
    // One warp of the rank waits for the rank's other warps and tells the peers; every caller then waits for all ranks.
    static __device__ __forceinline__ void meet(Params const& p, bool is_leader, int barrier, uint32_t const* arrived,
                                                int num_arrivals) {
        if (!p.device_barriers) return;
        if (is_leader) {
            wait_at_least(arrived, num_arrivals, kBarrierTimeout, p.rank, report(p));
            __syncwarp();
            signal_ranks(p, barrier);
        }
        wait_ranks(p, barrier, report(p));
    }
};

}  // namespace mok
