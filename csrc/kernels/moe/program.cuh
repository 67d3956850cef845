// What the forward and the backward program share: the tasks over row blocks, and what the background warps do.
#pragma once

#include "../persistent.cuh"
#include "combine.cuh"
#include "dispatch.cuh"

namespace mok {

// The tasks over row blocks: the shared expert's first, so that they hide the arrival of the first tokens.
class BlockTasks {
  public:
    __device__ __forceinline__ explicit BlockTasks(MoeParams const& p)
        : p_(p),
          order_{make_order(p.segments[0], p.gemm ? p.num_shared_blocks : 0),
                 make_order(p.segments[1], p.gemm ? num_routed_blocks(p) : 0)} {}

    __device__ __forceinline__ int num_blocks(int segment) const { return order_[segment].num_blocks; }
    __device__ __forceinline__ int num_tasks() const { return order_[0].num_tasks() + order_[1].num_tasks(); }

    __device__ __forceinline__ Task decode(int index) const {
        int const num_shared = order_[0].num_tasks();
        int const segment = index < num_shared ? kSharedSegment : kRoutedSegment;
        int const offset = segment == kSharedSegment ? index : index - num_shared;
        if (offset >= order_[segment].num_tasks()) return {kLastTask};
        TilePosition const tile = order_[segment].at(offset);
        BlockEntry entry = {0, tile.block * kBlockRows, rows_of_block(p_, segment, tile.block), 0};
        if (segment == kRoutedSegment) entry = p_.blocks[tile.block];
        return {static_cast<int>(tile.kind),
                segment,
                tile.block,
                tile.column,
                entry.expert,
                entry.first_row,
                entry.num_rows,
                ring_row(p_.segments[segment], tile.block)};
    }

  private:
    static __device__ __forceinline__ TaskOrder make_order(SegmentParams const& s, int num_blocks) {
        return {num_blocks, s.chunk_blocks, s.group_blocks, s.first_tiles, s.second_tiles};
    }

    MoeParams const& p_;
    TaskOrder order_[2];
};

// Program says with_op, which picks the op of a task's kind; an op says all else about its tiles.
template <class Program, class ProgramParams>
struct MoeProgram {
    using Params = ProgramParams;
    using Progress = mok::Progress;

    // Until the inputs of a task are there and its outputs may be overwritten. The caller fences.
    static __device__ __forceinline__ void wait_ready(Params const& p, Task const& task, Progress& progress,
                                                      WaitReport const& report) {
        Program::with_op(task.kind, [&](auto op) { decltype(op)::wait_ready(p, task, progress, report); });
    }
    static __device__ __forceinline__ Tile tile(Params const& p, Task const& task, int cta_rank) {
        return Program::with_op(task.kind, [&](auto op) { return decltype(op)::tile(p, task, cta_rank); });
    }
    static __device__ __forceinline__ bool is_idle(Params const& p, Task const& task) {
        return Program::with_op(task.kind, [&](auto op) { return decltype(op)::is_idle(p, task); });
    }
    static __device__ __forceinline__ int num_steps(Params const& p, Task const& task) {
        return Program::with_op(task.kind, [&](auto op) { return decltype(op)::num_steps(p, task); });
    }
    static __device__ __forceinline__ uint32_t* done_counter(Params const& p, Task const& task) {
        return Program::with_op(task.kind, [&](auto op) { return decltype(op)::done_counter(p, task); });
    }
    static __device__ __forceinline__ RowInfo row_info(Params const& p, Task const& task, Tile const& tile,
                                                       int warp_row) {
        RowInfo info = {};
        Program::with_op(task.kind, [&](auto op) {
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                int const row = warp_row + strip_row(i);
                if (row < tile.num_rows) info.row[i] = decltype(op)::row_info(p, task, tile.block_row + row);
            }
        });
        return info;
    }
    // Hooks for tiles that a launch begins with, or leaves, half summed up.
    static __device__ __forceinline__ bool load_accumulators(Params const&, Task const&, float (&)[kAccumulators]) {
        return false;
    }
    static __device__ __forceinline__ bool store_accumulators(Params const&, Task const&,
                                                              float const (&)[kAccumulators]) {
        return false;
    }

    // Releases a warp's stores, some of which may have been pushed to other ranks.
    static __device__ __forceinline__ void signal(Params const& p, uint32_t* counter) {
        if (p.world_size > 1) ptx::fence_acq_rel_sys();
        ptx::red_release_gpu_add(counter, 1);
    }

    static __device__ __forceinline__ WaitReport report(Params const& p) {
        return {p.error, &p.counters->error_claims, p.timeout_ns, p.rank};
    }

    // The helper warps that neither load nor schedule. One moves tokens, then joins the other in the sum.
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
