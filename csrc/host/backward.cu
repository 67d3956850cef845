#include "../kernels/moe/backward.cuh"
#include "launch_moe.h"

namespace mok {
namespace {

// Of a buffer that may not be wanted.
CUtensorMap encode_rows(bf16 const* data, int num_rows, int width, int64_t row_stride) {
    if (data == nullptr) return {};
    return encode_matrix(rows_at(data, row_stride), 1, num_rows, width, kBoxRows);
}

void encode_maps(BackwardMaps& maps, int segment, BackwardParams const& params, MlpWeights const& weights) {
    int const hidden = params.hidden, intermediate = weights.intermediate, experts = weights.num_experts;
    maps.gate[segment] = encode_matrix(weights.gate, experts, intermediate, hidden, kBoxRows);
    maps.up[segment] = encode_matrix(weights.up, experts, intermediate, hidden, kBoxRows);
    maps.down[segment] = encode_matrix(weights.down, experts, hidden, intermediate, kBoxRows);
    bool const is_routed = segment == kRoutedSegment;
    int const num_rows = is_routed ? params.segments[segment].ring_blocks * kBlockRows : params.num_tokens;
    TokenStream const& d_output = params.streams[0];
    TokenStream const& x = params.streams[1];
    maps.d_output[segment] = encode_rows(is_routed ? d_output.rows : d_output.tokens, num_rows, hidden, hidden);
    maps.input[segment] = encode_rows(is_routed ? x.rows : x.tokens, num_rows, hidden, hidden);
    SegmentGradients const& gradients = params.gradients[segment];
    bf16 const* const d_gate = gradients.d_gate_up;
    bf16 const* const d_up = d_gate == nullptr ? nullptr : d_gate + intermediate;
    maps.d_gate[segment] = encode_rows(d_gate, num_rows, intermediate, 2 * intermediate);
    maps.d_up[segment] = encode_rows(d_up, num_rows, intermediate, 2 * intermediate);
    maps.activation[segment] = encode_rows(gradients.activation, num_rows, intermediate, intermediate);
}

void fill_segment(BackwardParams& params, int segment, MlpWeights const& weights, int num_ctas, int ring_blocks) {
    SegmentPlan plan = plan_backward(params.hidden, weights.intermediate, num_ctas);
    plan.ring_blocks = ring_blocks;  // the weight gradients read all rows, so nothing is overwritten
    // Without d_x, a tile of the second GEMM only passes on the router gradients of its rows.
    if (!params.needs_d_x) plan.second_tiles = params.gradients[segment].d_weight_parts != nullptr ? 1 : 0;
    apply_plan(params.segments[segment], plan, weights.intermediate);
}

}  // namespace

void launch_backward(BackwardParams params, MlpWeights const& shared, MlpWeights const& routed,
                     LaunchSettings const& settings) {
    DeviceGuard const guard(settings.device);
    if (has_no_tokens(params)) return;
    int const num_ctas = plan_ctas(settings);
    BackwardMaps maps = {};
    if (params.most_blocks > 0) {
        fill_segment(params, kRoutedSegment, routed, num_ctas, params.most_blocks);
        encode_maps(maps, kRoutedSegment, params, routed);
    } else {
        disable(params.segments[kRoutedSegment]);
    }
    if (shared.num_experts > 0 && params.num_tokens > 0) {
        params.num_shared_blocks = ceil_div(params.num_tokens, kBlockRows);
        fill_segment(params, kSharedSegment, shared, num_ctas, params.num_shared_blocks);
        encode_maps(maps, kSharedSegment, params, shared);
    } else {
        disable(params.segments[kSharedSegment]);
    }
    launch_program<Backward>(params, maps, settings);
}

}  // namespace mok
