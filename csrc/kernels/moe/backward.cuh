// The backward program: the gradients through the row blocks, then the weight gradients, expert by expert.
#pragma once

#include "down_gradient.cuh"
#include "gate_up_gradient.cuh"
#include "program.cuh"
#include "weight_gradient.cuh"

namespace mok {

constexpr int kGateUpWeightKind = 2;  // after the two of TileKind
constexpr int kDownWeightKind = 3;

// The experts whose weight gradients a launch computes: those with rows in its blocks, and those without any rows where
// they come in the order.
struct ExpertRange {
    int begin, end;
};

// Whether this launch begins or ends within an expert's rows.
__device__ __forceinline__ bool begins_earlier(BackwardParams const& p, int expert) {
    return p.expert_blocks[expert] < p.first_block && p.expert_blocks[expert + 1] > p.first_block;
}
__device__ __forceinline__ bool ends_later(BackwardParams const& p, int expert) {
    int const end = p.first_block + p.most_blocks;
    return p.expert_blocks[expert] < end && p.expert_blocks[expert + 1] > end;
}

class BackwardTasks {
  public:
    __device__ __forceinline__ explicit BackwardTasks(BackwardParams const& p)
        : p_(p), blocks_(p), num_block_tasks_(blocks_.num_tasks()) {
        for (int segment = 0; segment < 2; ++segment) {
            gate_up_tasks_[segment] = GateUpWeightGradient::num_tasks(p, segment);
            down_tasks_[segment] = DownWeightGradient::num_tasks(p, segment);
        }
        experts_[kSharedSegment] = {0, blocks_.num_blocks(kSharedSegment) > 0 ? 1 : 0};
        bool const has_routed = p.gemm && gate_up_tasks_[kRoutedSegment] + down_tasks_[kRoutedSegment] > 0;
        experts_[kRoutedSegment] = has_routed ? find_experts() : ExpertRange{0, 0};
    }

    __device__ __forceinline__ Task decode(int index) const {
        if (index < num_block_tasks_) return blocks_.decode(index);
        index -= num_block_tasks_;
#pragma unroll
        for (int segment = 0; segment < 2; ++segment) {
            int const per_expert = gate_up_tasks_[segment] + down_tasks_[segment];
            int const num_tasks = (experts_[segment].end - experts_[segment].begin) * per_expert;
            if (index < num_tasks) {
                return weight_task(segment, experts_[segment].begin + index / per_expert, index % per_expert);
            }
            index -= num_tasks;
        }
        return {kLastTask};
    }

  private:
    __device__ __forceinline__ Task weight_task(int segment, int expert, int index) const {
        bool const is_gate_up = index < gate_up_tasks_[segment];
        int const offset = is_gate_up ? index : index - gate_up_tasks_[segment];
        int const row_tiles =
            is_gate_up ? GateUpWeightGradient::row_tiles(p_, segment) : DownWeightGradient::row_tiles(p_, segment);
        Task task = {is_gate_up ? kGateUpWeightKind : kDownWeightKind,
                     segment,
                     offset % row_tiles,
                     offset / row_tiles,
                     expert,
                     0,
                     0,
                     0};
        if (segment == kSharedSegment) {
            task.num_rows = p_.num_tokens;
            return task;
        }
        int const begin = block_in_launch(p_.expert_blocks[expert]);
        int const end = block_in_launch(p_.expert_blocks[expert + 1]);
        if (begin == end) return task;
        task.ring_row = begin * kBlockRows;
        task.num_rows = (end - 1 - begin) * kBlockRows + p_.blocks[end - 1].num_rows;
        return task;
    }

    __device__ __forceinline__ int block_in_launch(int block) const {
        int const relative = block - p_.first_block;
        return relative < 0 ? 0 : min_int(relative, blocks_.num_blocks(kRoutedSegment));
    }

    __device__ __forceinline__ ExpertRange find_experts() const {
        int const first = p_.first_block, end = first + p_.most_blocks, num_blocks = *p_.num_routed_blocks;
        if (first > 0 && first >= num_blocks) return {0, 0};
        int const* const blocks = p_.expert_blocks;
        int const begin = first_expert([&](int e) { return blocks[e + 1] > first || blocks[e] >= first; });
        if (end >= num_blocks) return {begin, p_.num_local_experts};
        return {begin, first_expert([&](int e) { return blocks[e] >= end; })};
    }

    // The first expert for which the condition holds; it holds for all that follow.
    template <class Condition>
    __device__ __forceinline__ int first_expert(Condition holds) const {
        int low = 0, high = p_.num_local_experts;
        while (low < high) {
            int const middle = (low + high) / 2;
            if (holds(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low;
    }

    BackwardParams const& p_;
    BlockTasks blocks_;
    int num_block_tasks_;
    int gate_up_tasks_[2];
    int down_tasks_[2];
    ExpertRange experts_[2];
};

struct Backward : MoeProgram<Backward, BackwardParams> {
    using TensorMaps = BackwardMaps;

    template <class Visitor>
    static __device__ __forceinline__ auto with_op(int kind, Visitor visit) {
        if (kind == static_cast<int>(TileKind::kFirst)) return visit(DownGradient{});
        if (kind == static_cast<int>(TileKind::kSecond)) return visit(GateUpGradient{});
        if (kind == kGateUpWeightKind) return visit(GateUpWeightGradient{});
        return visit(DownWeightGradient{});
    }
    template <class Visitor>
    static __device__ __forceinline__ void with_layout(int kind, Visitor visit) {
        if (is_weight_gradient(kind)) {
            visit(Layout<Major::kMN, Major::kMN>{});
        } else {
            visit(Layout<Major::kK, Major::kMN>{});
        }
    }

    // What the launch before has summed up of this expert.
    static __device__ __forceinline__ bool load_accumulators(Params const& p, Task const& task,
                                                             float (&acc)[kAccumulators]) {
        if (p.accumulators_in == nullptr || !is_routed_weight(task) || !begins_earlier(p, task.expert)) return false;
        float const* const saved = p.accumulators_in + accumulator_offset(p, task);
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) acc[i] = saved[i * kMmaThreads];
        return true;
    }
    // Whether the next launch goes on with this tile.
    static __device__ __forceinline__ bool store_accumulators(Params const& p, Task const& task,
                                                              float const (&acc)[kAccumulators]) {
        if (p.accumulators_out == nullptr || !is_routed_weight(task) || !ends_later(p, task.expert)) return false;
        float* const saved = p.accumulators_out + accumulator_offset(p, task);
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) saved[i * kMmaThreads] = acc[i];
        return true;
    }

    static __device__ __forceinline__ BackwardTasks tasks(Params const& p) { return BackwardTasks(p); }

  private:
    static constexpr int kMmaThreads = kMmaWarps * kWarpSize;

    static __device__ __forceinline__ bool is_weight_gradient(int kind) { return kind >= kGateUpWeightKind; }
    static __device__ __forceinline__ bool is_routed_weight(Task const& task) {
        return is_weight_gradient(task.kind) && task.segment == kRoutedSegment;
    }
    static __device__ __forceinline__ int64_t accumulator_offset(Params const& p, Task const& task) {
        bool const is_gate_up = task.kind == kGateUpWeightKind;
        int const row_tiles = is_gate_up ? GateUpWeightGradient::row_tiles(p, task.segment)
                                         : DownWeightGradient::row_tiles(p, task.segment);
        int const before = is_gate_up ? 0 : GateUpWeightGradient::num_tasks(p, task.segment);
        int const tile = (before + task.column * row_tiles + task.block) * kClusterSize + ptx::cluster_ctarank();
        return int64_t{tile} * (kTileRows * kTileColumns) + (threadIdx.x - kHelperWarps * kWarpSize);
    }
};

}  // namespace mok
