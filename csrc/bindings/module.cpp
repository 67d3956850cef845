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
template <class T>
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

    py::class_<T>& py_class() { return class_; }

  private:
    py::class_<T> class_;
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

void bind_forward(py::module_& m) {
    StructBinder<SegmentParams>(m, "SegmentParams")
        .pointer("activation", &SegmentParams::activation)
        .pointer("gate_up", &SegmentParams::gate_up)
        .value("gate_up_rows", &SegmentParams::gate_up_rows)
        .pointer("gate_up_done", &SegmentParams::gate_up_done)
        .pointer("down_done", &SegmentParams::down_done);
    auto segment = [](int index) { return [index](ForwardParams& p) -> SegmentParams& { return p.segments[index]; }; };
    StructBinder<ForwardParams>(m, "ForwardParams")
        .pointer("num_routed_blocks", &ForwardParams::num_routed_blocks)
        .pointer("blocks", &ForwardParams::blocks)
        .pointer("row_route", &ForwardParams::row_route)
        .pointer("route_row", &ForwardParams::route_row)
        .pointer("router_weights", &ForwardParams::router_weights)
        .pointer("x", &ForwardParams::x)
        .pointer("output", &ForwardParams::output)
        .pointer("shared_output", &ForwardParams::shared_output)
        .pointers("route_output", &ForwardParams::route_output)
        .pointers("published_x", &ForwardParams::published_x)
        .pointer("gathered_x", &ForwardParams::gathered_x)
        .pointer("gathered", &ForwardParams::gathered)
        .pointers("flags", &ForwardParams::flags)
        .pointer("counters", &ForwardParams::counters)
        .pointer("block_counters", &ForwardParams::block_counters)
        .value("num_block_counters", &ForwardParams::num_block_counters)
        .pointer("error", &ForwardParams::error)
        .value("timeout_ns", &ForwardParams::timeout_ns)
        .value("swiglu_limit", &ForwardParams::swiglu_limit)
        .value("num_tokens", &ForwardParams::num_tokens)
        .value("token_capacity", &ForwardParams::token_capacity)
        .value("top_k", &ForwardParams::top_k)
        .value("hidden", &ForwardParams::hidden)
        .value("rank", &ForwardParams::rank)
        .value("world_size", &ForwardParams::world_size)
        .value("publish", &ForwardParams::publish)
        .value("gemm", &ForwardParams::gemm)
        .value("combine", &ForwardParams::combine)
        .value("device_barriers", &ForwardParams::device_barriers)
        .py_class()
        .def_property_readonly("shared", segment(kSharedSegment), py::return_value_policy::reference_internal)
        .def_property_readonly("routed", segment(kRoutedSegment), py::return_value_policy::reference_internal);
    m.def("launch_forward", &launch_forward, py::arg("params"), py::arg("shared"), py::arg("routed"),
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
        .def_readonly("gate_up_tiles", &SegmentPlan::gate_up_tiles)
        .def_readonly("down_tiles", &SegmentPlan::down_tiles)
        .def_readonly("chunk_blocks", &SegmentPlan::chunk_blocks)
        .def_readonly("ring_blocks", &SegmentPlan::ring_blocks);
    m.def("plan_segment", &plan_segment, py::arg("hidden"), py::arg("intermediate"), py::arg("num_sms"));
    m.def("plan_schedule_grid", &plan_schedule_grid, py::arg("num_routes"), py::arg("num_sms"));
    m.def("device_num_sms", &device_num_sms, py::arg("device"));
}

}  // namespace
}  // namespace mok

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled kernels of mok. Use mok.functional; this module takes raw device pointers.";
    mok::bind_weights(m);
    mok::bind_schedule(m);
    mok::bind_forward(m);
    mok::bind_layout(m);
}
