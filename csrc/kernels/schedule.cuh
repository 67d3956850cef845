// Builds the schedule: a stable counting sort of all ranks' routes by expert, order (expert, source rank, token, k).
//
// Each CTA takes a contiguous segment of the routes and each of its warps a contiguous part of that, so "how many equal
// ids come before me" is a sum of three counts: earlier CTAs, earlier warps, earlier lanes. Cost O(T K world / SMs);
// nothing depends on timing.
#pragma once

#include "../common/params.h"
#include "../common/task_order.h"
#include "../device/sync/wait.cuh"

namespace mok {

constexpr int kScheduleWarps = 16;
constexpr int kScheduleThreads = kScheduleWarps * kWarpSize;

__device__ __forceinline__ int load_id(ScheduleParams const& p, int64_t route) {
    if (p.id_bytes == 8) {
        int64_t const id = static_cast<int64_t const*>(p.top_experts)[route];
        return id >= -1 && id < p.num_experts ? static_cast<int>(id) : -2;
    }
    int const id = static_cast<int32_t const*>(p.top_experts)[route];
    return id >= -1 && id < p.num_experts ? id : -2;
}

// A barrier among the CTAs of this launch, which are all resident (cooperative launch).
__device__ __forceinline__ void grid_barrier(ScheduleParams const& p, WaitReport const& report) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t const generation = ptx::ld_acquire_gpu(&p.grid_barrier[1]);
        if (ptx::atom_acq_rel_gpu_add(&p.grid_barrier[0], 1) == gridDim.x - 1) {
            p.grid_barrier[0] = 0;
            ptx::red_release_gpu_add(&p.grid_barrier[1], 1);
        } else {
            Deadline deadline;
            while (ptx::ld_acquire_gpu(&p.grid_barrier[1]) == generation) {
                if (deadline.passed(report)) {
                    report_error(report, kGridTimeout, 0, generation + 1, generation);
                    break;
                }
            }
        }
    }
    __syncthreads();
}

// Writes this rank's ids, -1 beyond its tokens, into its part of every peer's table.
__device__ __forceinline__ void publish_ids(ScheduleParams const& p) {
    int const routes_per_rank = p.token_capacity * p.top_k;
    for (int i = blockIdx.x * kScheduleThreads + threadIdx.x; i < routes_per_rank; i += gridDim.x * kScheduleThreads) {
        int const id = i < p.num_tokens * p.top_k ? load_id(p, i) : -1;
        for (int peer = 0; peer < p.world_size; ++peer) {
            p.gathered_ids[peer][static_cast<int64_t>(p.rank) * routes_per_rank + i] = id;
        }
    }
}

// Exclusive prefix sum over the CTA of one value a thread; also returns the total.
__device__ __forceinline__ int block_exclusive_sum(int value, int& total) {
    __shared__ int warp_sums[kScheduleWarps];
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int inclusive = value;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
        int const below = __shfl_up_sync(0xFFFFFFFFu, inclusive, offset);
        if (lane >= offset) inclusive += below;
    }
    __syncthreads();
    if (lane == kWarpSize - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < kScheduleWarps; ++w) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    return before + inclusive - value;
}

struct SortRange {  // the routes of one warp
    int begin, end;
};

class ScheduleSort {
  public:
    // `counts` is shared memory [kScheduleWarps, num_experts].
    __device__ ScheduleSort(ScheduleParams const& p, int* counts) : p_(p), counts_(counts) {
        routes_per_rank_ = p.token_capacity * p.top_k;
        // One rank reads its own ids and has none beyond its tokens; several read the gathered table, whose ranks all
        // have token_capacity rows.
        num_routes_ = p.world_size == 1 ? p.num_tokens * p.top_k : p.world_size * routes_per_rank_;
        int const per_warp = ceil_div(ceil_div(num_routes_, gridDim.x * kScheduleWarps), kWarpSize) * kWarpSize;
        int const warp = blockIdx.x * kScheduleWarps + threadIdx.x / kWarpSize;
        range_ = {min_int(warp * per_warp, num_routes_), min_int((warp + 1) * per_warp, num_routes_)};
    }

    // Counts the ids of each warp's part, and writes the CTA's sums to segment_counts.
    __device__ void count(WaitReport const& report) {
        int const lane = threadIdx.x % kWarpSize;
        int* const mine = counts_ + threadIdx.x / kWarpSize * p_.num_experts;
        for (int i = threadIdx.x; i < kScheduleWarps * p_.num_experts; i += kScheduleThreads) counts_[i] = 0;
        __syncthreads();
        for (int first = range_.begin; first < range_.end; first += kWarpSize) {
            int const expert = id(first + lane, report);
            uint32_t const equal = __match_any_sync(0xFFFFFFFFu, expert);
            if (expert >= 0 && __ffs(equal) - 1 == lane) mine[expert] += __popc(equal);
            __syncwarp();
        }
        __syncthreads();
        for (int e = threadIdx.x; e < p_.num_experts; e += kScheduleThreads) {
            int sum = 0;
            for (int w = 0; w < kScheduleWarps; ++w) sum += counts_[w * p_.num_experts + e];
            p_.segment_counts[static_cast<int64_t>(blockIdx.x) * p_.num_experts + e] = sum;
        }
    }

    // Turns the counts into each warp's first row of each expert; CTA 0 writes the offsets, all CTAs the row blocks.
    __device__ void place(WaitReport const& report) {
        int expert_base = 0;  // rows of the owner's earlier experts, over the chunks of kScheduleThreads experts
        int block_base = 0;
        int owner_base = 0;
        for (int first = 0; first < p_.num_experts; first += kScheduleThreads) {
            int const expert = first + threadIdx.x;
            int before = 0, count = 0;
            if (expert < p_.num_experts) sum_segments(expert, before, count);
            int chunk_rows, chunk_blocks;
            bool const is_local = expert < p_.num_experts && expert / p_.num_local_experts == p_.rank;
            int const rows_before = expert_base + block_exclusive_sum(count, chunk_rows);
            int const num_blocks = is_local ? ceil_div(count, kBlockRows) : 0;
            int const first_block = block_base + block_exclusive_sum(num_blocks, chunk_blocks);
            expert_base += chunk_rows;
            block_base += chunk_blocks;
            if (expert < p_.num_experts) global_offsets()[expert] = rows_before;
            __syncthreads();
            if (expert < p_.num_experts) {
                int const owner_first = expert / p_.num_local_experts * p_.num_local_experts;
                owner_base = global_offsets()[owner_first];
                int next = rows_before - owner_base + before;
                for (int w = 0; w < kScheduleWarps; ++w) {
                    int& slot = counts_[w * p_.num_experts + expert];
                    int const warp_count = slot;
                    slot = next;
                    next += warp_count;
                }
                if (is_local) write_expert(expert, rows_before - owner_base, count, first_block, num_blocks);
            }
        }
        __syncthreads();
        finish_rows(report);
        // With too few rows nothing is routed, and the host raises: the kernels must not read beyond the table.
        if (blockIdx.x == 0 && threadIdx.x == 0) *p_.num_blocks = *num_rows() <= p_.row_capacity ? block_base : 0;
    }

    __device__ void scatter() {
        int const lane = threadIdx.x % kWarpSize;
        int* const next_row = counts_ + threadIdx.x / kWarpSize * p_.num_experts;
        int const own_first = p_.world_size == 1 ? 0 : p_.rank * routes_per_rank_;
        for (int first = range_.begin; first < range_.end; first += kWarpSize) {
            int const route = first + lane;
            int const expert = route < range_.end ? id_or_dropped(route) : -1;
            uint32_t const equal = __match_any_sync(0xFFFFFFFFu, expert);
            int const row = expert >= 0 ? next_row[expert] + __popc(equal & ((1u << lane) - 1)) : -1;
            __syncwarp();
            if (expert >= 0 && __ffs(equal) - 1 == lane) next_row[expert] += __popc(equal);
            __syncwarp();
            if (route >= range_.end) continue;
            int const owner = expert >= 0 ? expert / p_.num_local_experts : -1;
            int const own = route - own_first;
            if (own >= 0 && own < p_.num_tokens * p_.top_k) {
                p_.route_row[own] = row;
                p_.route_rank[own] = owner;
            }
            if (owner == p_.rank && row < p_.row_capacity) p_.row_route[row] = route;
        }
    }

  private:
    // Where the offsets of all experts over all ranks are kept, behind the counts.
    __device__ int* global_offsets() const { return counts_ + kScheduleWarps * p_.num_experts; }
    // Routed rows on this rank.
    __device__ int* num_rows() const { return global_offsets() + p_.num_experts; }

    __device__ int id_or_dropped(int route) const {
        int const expert = p_.world_size == 1 ? load_id(p_, route) : p_.gathered_ids[p_.rank][route];
        return expert >= 0 ? expert : -1;
    }

    __device__ int id(int route, WaitReport const& report) const {
        if (route >= range_.end) return -1;
        int const expert = p_.world_size == 1 ? load_id(p_, route) : p_.gathered_ids[p_.rank][route];
        if (expert == -2)
            report_error(report, kExpertOutOfRange, route / p_.top_k, p_.num_experts - 1, route % p_.top_k);
        return expert >= 0 ? expert : -1;
    }

    // Routes to `expert` in earlier CTAs, and in all.
    __device__ void sum_segments(int expert, int& before, int& total) const {
#pragma unroll 8
        for (int cta = 0; cta < static_cast<int>(gridDim.x); ++cta) {
            int const count = p_.segment_counts[static_cast<int64_t>(cta) * p_.num_experts + expert];
            if (cta < static_cast<int>(blockIdx.x)) before += count;
            total += count;
        }
    }

    __device__ void write_expert(int expert, int first_row, int count, int first_block, int num_blocks) const {
        int const local = expert - p_.rank * p_.num_local_experts;
        bool const is_last = local == p_.num_local_experts - 1;
        if (is_last) *num_rows() = first_row + count;
        if (blockIdx.x == 0) {
            p_.expert_offsets[local] = first_row;
            p_.expert_blocks[local] = first_block;
            if (is_last) p_.expert_offsets[local + 1] = first_row + count;
            if (is_last) p_.expert_blocks[local + 1] = first_block + num_blocks;
        }
        for (int block = blockIdx.x; block < min_int(num_blocks, p_.max_blocks - first_block); block += gridDim.x) {
            int const offset = block * kBlockRows;
            p_.blocks[first_block + block] = {local, first_row + offset, min_int(kBlockRows, count - offset), 0};
        }
    }

    // Marks the unused end of the table; more rows than it holds are an error.
    __device__ void finish_rows(WaitReport const& report) const {
        int const first_unused = *num_rows() + blockIdx.x * kScheduleThreads + threadIdx.x;
        for (int64_t row = first_unused; row < p_.row_capacity; row += gridDim.x * kScheduleThreads)
            p_.row_route[row] = -1;
        if (blockIdx.x != 0 || threadIdx.x != 0 || *num_rows() <= p_.row_capacity) return;
        report_error(report, kScheduleOverflow, 0, p_.row_capacity, *num_rows());
    }

    ScheduleParams const& p_;
    int* counts_;
    int routes_per_rank_;
    int num_routes_;
    SortRange range_;
};

// Shared memory of the sort, in bytes.
MOK_HOST_DEVICE int schedule_shared_bytes(int num_experts) {
    return ((kScheduleWarps + 1) * num_experts + 1) * static_cast<int>(sizeof(int));
}

__global__ void __launch_bounds__(kScheduleThreads, 1) schedule_kernel(__grid_constant__ ScheduleParams const p) {
    extern __shared__ int schedule_counts[];
    WaitReport const report = {p.error, p.error_claims, p.timeout_ns, p.rank};
    if (p.publish) publish_ids(p);
    if (!p.sort) return;
    ScheduleSort sort(p, schedule_counts);
    sort.count(report);
    grid_barrier(p, report);
    sort.place(report);
    sort.scatter();
}

}  // namespace mok
