// The forward program: which ops the tiles run.
#pragma once

#include "down.cuh"
#include "gate_up.cuh"
#include "program.cuh"

namespace mok {

struct Forward : MoeProgram<Forward, ForwardParams> {
    using TensorMaps = ForwardMaps;

    template <class Visitor>
    static __device__ __forceinline__ auto with_op(int kind, Visitor visit) {
        if (kind == static_cast<int>(TileKind::kFirst)) return visit(GateUp{});
        return visit(Down{});
    }
    template <class Visitor>
    static __device__ __forceinline__ void with_layout(int, Visitor visit) {
        visit(Layout<Major::kK, Major::kK>{});
    }
    static __device__ __forceinline__ BlockTasks tasks(Params const& p) { return BlockTasks(p); }
};

}  // namespace mok
