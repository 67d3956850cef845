// Python bindings: raw pointers and sizes in named structs. No torch, so that one build serves every torch version.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../common/task_order.h"
#include "../host/moe.h"

#ifndef MOK_ARCHITECTURES
#error "the build must define MOK_ARCHITECTURES, the compute capabilities that the kernels are compiled for"
#endif

namespace py = pybind11;

namespace mok {
namespace {

// Binds a plain struct field by field; pointers appear as integers, per-rank pointers as lists of integers.
template <class T, class... Base>
class StructBinder {
  public:
    StructBinder(py::module_& m, char const* name) : class_(m, name) {
        class_.def(py::init([] { return T{}; }));
    }

    template <class V>
    StructBinder& value(char const* name, V T::* field) {
        class_.def_readwrite(name, field);
        return *this;
    }

    template <class P>
    StructBinder& pointer(char const* name, P* T::* field) {
        class_.def_property(
            name, [field](T const& s) { return reinterpret_cast<uint64_t>(s.*field); },
            [field](T& s, uint64_t address) { s.*field = reinterpret_cast<P*>(address); });
        return *this;
    }

    template <class P>
    StructBinder& pointers(char const* name, P* (T::*field)[kMaxRanks]) {
        class_.def_property(
            name,
            [field](T const& s) {
                std::vector<uint64_t> addresses;
                for (P* pointer : s.*field) addresses.push_back(reinterpret_cast<uint64_t>(pointer));
                return addresses;
            },
            [field, name = std::string(name)](T& s, std::vector<uint64_t> const& addresses) {
                if (addresses.size() > kMaxRanks) {
                    throw std::invalid_argument(name + ": expected at most " + std::to_string(kMaxRanks) +
                                                " ranks, got " + std::to_string(addresses.size()));
                }
                for (size_t i = 0; i < addresses.size(); ++i) (s.*field)[i] = reinterpret_cast<P*>(addresses[i]);
            });
        return *this;
    }

    // One element of an array of structs, by reference.
    template <class V, size_t kSize>
    StructBinder& element(char const* name, V (T::*field)[kSize], int index) {
        class_.def_property_readonly(
            name, [field, index](T& s) -> V& { return (s.*field)[index]; },
            py::return_value_policy::reference_internal);
        return *this;
    }

  private:
    py::class_<T, Base...> class_;
};

void bind_weights(py::module_& m) {
    py::class_<MatrixView>(m, "MatrixView")
        .def(py::init<uint64_t, int64_t, int64_t>(), py::arg("data"), py::arg("batch_stride"), py::arg("row_stride"));
    StructBinder<MlpWeights>(m, "MlpWeights")
        .value("gate", &MlpWeights::gate)
        .value("up", &MlpWeights::up)
        .value("down", &MlpWeights::down)
        .value("num_experts", &MlpWeights::num_experts)
        .value("intermediate", &MlpWeights::intermediate);
    StructBinder<LaunchSettings>(m, "LaunchSettings")
        .value("device", &LaunchSettings::device)
        .value("stream", &LaunchSettings::stream)
        .value("num_sms", &LaunchSettings::num_sms);
}

void bind_schedule(py::module_& m) {
    StructBinder<ScheduleParams>(m, "ScheduleParams")
        .pointer("top_experts", &ScheduleParams::top_experts)
        .value("id_bytes", &ScheduleParams::id_bytes)
        .value("num_tokens", &ScheduleParams::num_tokens)
        .value("token_capacity", &ScheduleParams::token_capacity)
        .value("top_k", &ScheduleParams::top_k)
        .value("num_experts", &ScheduleParams::num_experts)
        .value("num_local_experts", &ScheduleParams::num_local_experts)
        .value("rank", &ScheduleParams::rank)
        .value("world_size", &ScheduleParams::world_size)
        .value("row_capacity", &ScheduleParams::row_capacity)
        .pointers("gathered_ids", &ScheduleParams::gathered_ids)
        .pointer("expert_offsets", &ScheduleParams::expert_offsets)
        .pointer("row_route", &ScheduleParams::row_route)
        .pointer("route_row", &ScheduleParams::route_row)
        .pointer("route_rank", &ScheduleParams::route_rank)
        .pointer("blocks", &ScheduleParams::blocks)
        .pointer("expert_blocks", &ScheduleParams::expert_blocks)
        .value("max_blocks", &ScheduleParams::max_blocks)
        .pointer("num_blocks", &ScheduleParams::num_blocks)
        .pointer("segment_counts", &ScheduleParams::segment_counts)
        .pointer("grid_barrier", &ScheduleParams::grid_barrier)
        .pointer("error_claims", &ScheduleParams::error_claims)
        .pointer("error", &ScheduleParams::error)
        .value("timeout_ns", &ScheduleParams::timeout_ns)
        .value("publish", &ScheduleParams::publish)
        .value("sort", &ScheduleParams::sort);
    m.def("launch_schedule", &launch_schedule, py::arg("params"), py::arg("settings"));
}

void bind_common(py::module_& m) {
    StructBinder<SegmentParams>(m, "SegmentParams")
        .pointer("gate_up", &SegmentParams::gate_up)
        .value("gate_up_rows", &SegmentParams::gate_up_rows)
        .value("gate_up_in_blocks", &SegmentParams::gate_up_in_blocks)
        .pointer("first_done", &SegmentParams::first_done)
        .pointer("second_done", &SegmentParams::second_done)
        .pointer("activation", &SegmentParams::activation);
    StructBinder<TokenStream>(m, "TokenStream")
        .pointer("tokens", &TokenStream::tokens)
        .pointers("published", &TokenStream::published)
        .pointer("rows", &TokenStream::rows)
        .pointer("gathered", &TokenStream::gathered);
    StructBinder<MoeParams>(m, "MoeParams")
        .value("num_streams", &MoeParams::num_streams)
        .pointer("zero_row", &MoeParams::zero_row)
        .value("first_block", &MoeParams::first_block)
        .value("most_blocks", &MoeParams::most_blocks)
        .pointer("num_routed_blocks", &MoeParams::num_routed_blocks)
        .pointer("blocks", &MoeParams::blocks)
        .pointer("row_route", &MoeParams::row_route)
        .pointer("route_row", &MoeParams::route_row)
        .pointer("route_weights", &MoeParams::route_weights)
        .pointer("output", &MoeParams::output)
        .pointer("shared_output", &MoeParams::shared_output)
        .pointers("route_output", &MoeParams::route_output)
        .pointers("flags", &MoeParams::flags)
        .pointer("counters", &MoeParams::counters)
        .pointer("block_counters", &MoeParams::block_counters)
        .value("num_block_counters", &MoeParams::num_block_counters)
        .pointer("error", &MoeParams::error)
        .value("timeout_ns", &MoeParams::timeout_ns)
        .value("swiglu_limit", &MoeParams::swiglu_limit)
        .value("num_tokens", &MoeParams::num_tokens)
        .value("token_capacity", &MoeParams::token_capacity)
        .value("top_k", &MoeParams::top_k)
        .value("hidden", &MoeParams::hidden)
        .value("rank", &MoeParams::rank)
        .value("world_size", &MoeParams::world_size)
        .value("publish", &MoeParams::publish)
        .value("gemm", &MoeParams::gemm)
        .value("combine", &MoeParams::combine)
        .value("combine_by_row", &MoeParams::combine_by_row)
        .value("device_barriers", &MoeParams::device_barriers)
        .element("shared", &MoeParams::segments, kSharedSegment)
        .element("routed", &MoeParams::segments, kRoutedSegment)
        .element("first_stream", &MoeParams::streams, 0)
        .element("second_stream", &MoeParams::streams, 1);
}

void bind_forward(py::module_& m) {
    StructBinder<ForwardParams, MoeParams>(m, "ForwardParams");
    m.def("launch_forward", &launch_forward, py::arg("params"), py::arg("shared"), py::arg("routed"),
          py::arg("settings"));
}

void bind_backward(py::module_& m) {
    StructBinder<WeightGradient>(m, "WeightGradient")
        .pointer("data", &WeightGradient::data)
        .value("expert_stride", &WeightGradient::expert_stride)
        .value("row_stride", &WeightGradient::row_stride)
        .value("mode", &WeightGradient::mode);
    m.attr("WRITE_BF16") = static_cast<int>(kWriteBf16);
    m.attr("ADD_BF16") = static_cast<int>(kAddBf16);
    m.attr("ADD_FLOAT") = static_cast<int>(kAddFloat);
    StructBinder<SegmentGradients>(m, "SegmentGradients")
        .pointer("d_gate_up", &SegmentGradients::d_gate_up)
        .pointer("activation", &SegmentGradients::activation)
        .pointer("d_weight_parts", &SegmentGradients::d_weight_parts)
        .value("gate", &SegmentGradients::gate)
        .value("up", &SegmentGradients::up)
        .value("down", &SegmentGradients::down);
    StructBinder<BackwardParams, MoeParams>(m, "BackwardParams")
        .pointer("expert_blocks", &BackwardParams::expert_blocks)
        .value("needs_d_x", &BackwardParams::needs_d_x)
        .value("num_local_experts", &BackwardParams::num_local_experts)
        .pointers("router_weights", &BackwardParams::router_weights)
        .pointers("d_router_weights", &BackwardParams::d_router_weights)
        .pointer("accumulators_in", &BackwardParams::accumulators_in)
        .pointer("accumulators_out", &BackwardParams::accumulators_out)
        .element("shared_gradients", &BackwardParams::gradients, kSharedSegment)
        .element("routed_gradients", &BackwardParams::gradients, kRoutedSegment);
    m.def("launch_backward", &launch_backward, py::arg("params"), py::arg("shared"), py::arg("routed"),
          py::arg("settings"));
}

// What Python must know to size buffers and read records.
void bind_layout(py::module_& m) {
    m.attr("BLOCK_ROWS") = kBlockRows;
    m.attr("MAX_RANKS") = kMaxRanks;
    m.attr("COUNTER_BYTES") = sizeof(LaunchCounters);
    m.attr("BLOCK_ENTRY_BYTES") = sizeof(BlockEntry);
    m.attr("ERROR_RECORD_BYTES") = sizeof(ErrorRecord);
    m.attr("ARCHITECTURES") = MOK_ARCHITECTURES;
    py::class_<SegmentPlan>(m, "SegmentPlan")
        .def_readonly("first_tiles", &SegmentPlan::first_tiles)
        .def_readonly("second_tiles", &SegmentPlan::second_tiles)
        .def_readonly("chunk_blocks", &SegmentPlan::chunk_blocks)
        .def_readonly("ring_blocks", &SegmentPlan::ring_blocks);
    m.def("plan_forward", &plan_forward, py::arg("hidden"), py::arg("intermediate"), py::arg("num_sms"));
    m.def("plan_backward", &plan_backward, py::arg("hidden"), py::arg("intermediate"), py::arg("num_sms"));
    m.attr("TILE_ROWS") = kTileRows;
    m.attr("TILE_COLUMNS") = kTileColumns;
    m.attr("CLUSTER_SIZE") = kClusterSize;
    m.def("plan_schedule_grid", &plan_schedule_grid, py::arg("num_routes"), py::arg("num_sms"));
    m.def("device_num_sms", &device_num_sms, py::arg("device"));
}

}  // namespace
}  // namespace mok

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled kernels of mok. Use mok.functional; this module takes raw device pointers.";
    mok::bind_weights(m);
    mok::bind_schedule(m);
    mok::bind_common(m);
    mok::bind_forward(m);
    mok::bind_backward(m);
    mok::bind_layout(m);
}
