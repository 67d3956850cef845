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
                entry.num_rows,
                ring_row(p.segments[segment], tile.block)};
    }
};

struct Forward {
    using Params = ForwardParams;
    using TensorMaps = mok::TensorMaps;

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
    // Until the inputs of a task are there and its outputs may be overwritten. The caller fences.
    static __device__ __forceinline__ void wait_ready(Params const& p, Task const& task, WaitReport const& report) {
        if (task.kind == kLastTask) return;
        with_op(task.kind, [&](auto op) { decltype(op)::wait_ready(p, task, report); });
    }
    static __device__ __forceinline__ RowInfo row_info(Params const& p, Task const& task, Tile const& tile,
                                                       int warp_row) {
        RowInfo info = {};
        if (is_gate_up(task)) return info;
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            int const row = warp_row + strip_row(i);
            if (row < tile.num_rows) info.row[i] = Down::row_info(p, task, tile.block_row + row);
        }
        return info;
    }
    static __device__ __forceinline__ uint32_t* done_counter(Params const& p, Task const& task) {
        SegmentParams const& segment = p.segments[task.segment];
        return (is_gate_up(task) ? segment.gate_up_done : segment.down_done) + task.block;
    }
    // Releases a warp's stores; down tiles may have been pushed to other ranks.
    static __device__ __forceinline__ void signal(Params const& p, uint32_t* counter) {
        if (p.world_size > 1) ptx::fence_acq_rel_sys();
        ptx::red_release_gpu_add(counter, 1);
    }

    static __device__ __forceinline__ WaitReport report(Params const& p) {
        return {p.error, &p.counters->error_claims, p.timeout_ns, p.rank};
    }

    static __device__ __forceinline__ TaskOrder task_order(SegmentParams const& s, int num_blocks) {
        return {num_blocks, s.chunk_blocks, s.group_blocks, s.gate_up_tiles, s.down_tiles};
    }
    static __device__ __forceinline__ ForwardTasks tasks(Params const& p) {
        return {p,
                {task_order(p.segments[0], p.gemm ? p.num_shared_blocks : 0),
                 task_order(p.segments[kRoutedSegment], p.gemm ? *p.num_routed_blocks : 0)}};
    }

    // The helper warps that neither load nor schedule. One moves tokens, then joins the other in the weighted sum.
    static __device__ __forceinline__ void background(Params const& p, CopyStorage& storage, int warp) {
        if (warp == 0) {
            WaitReport const wait_report = report(p);
            RowCopier copier(storage, p.hidden * static_cast<int>(sizeof(bf16)), wait_report);
            if (p.publish) publish_tokens(p, copier);
            if (p.publish) meet(p, blockIdx.x == 0, 0, &p.counters->published_ctas, gridDim.x);
            if (p.gemm) gather_rows(p, copier, wait_report);
        }
        if (p.combine) {
            bool const is_leader = blockIdx.x == 0 && warp == 0;
            meet(p, is_leader, 1, &p.counters->gemm_finished_warps, gridDim.x * kMmaWarps);
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
    // One warp of the rank waits for the rank's other warps and tells the peers; every caller then waits for
    // all ranks.
    static __device__ __forceinline__ void meet(Params const& p, bool is_leader, int barrier, uint32_t const* arrived,
                                                int num_arrivals) {
        if (!p.device_barriers) return;
        if (is_leader) {
            wait_at_least(arrived, num_arrivals, kBarrierTimeout, p.rank, report(p));
            signal_ranks(p, barrier);
        }
        wait_ranks(p, barrier, report(p));
    }
};

}  // namespace mok
