#include "../kernels/moe/forward.cuh"
#include "launch_moe.h"

namespace mok {
namespace {

void encode_maps(ForwardMaps& maps, int segment, ForwardParams const& params, MlpWeights const& weights) {
    int const hidden = params.hidden, intermediate = weights.intermediate, experts = weights.num_experts;
    SegmentParams const& s = params.segments[segment];
    int const ring_rows = s.ring_blocks * kBlockRows;
    maps.gate[segment] = encode_matrix(weights.gate, experts, intermediate, hidden, kGateUpColumns);
    maps.up[segment] = encode_matrix(weights.up, experts, intermediate, hidden, kGateUpColumns);
    if (s.activation != nullptr) {
        maps.down[segment] = encode_matrix(weights.down, experts, hidden, intermediate, kTileColumns / 2);
        maps.activation[segment] =
            encode_matrix(rows_at(s.activation, intermediate), 1, ring_rows, intermediate, kTileRows);
    }
    bool const is_routed = segment == kRoutedSegment;
    TokenStream const& x = params.streams[0];
    maps.input[segment] = encode_matrix(rows_at(is_routed ? x.rows : x.tokens, hidden), 1,
                                        is_routed ? ring_rows : params.num_tokens, hidden, kTileRows);
}

void fill_segment(SegmentParams& segment, MlpWeights const& weights, int hidden, int num_ctas) {
    apply_plan(segment, plan_forward(hidden, weights.intermediate, num_ctas), weights.intermediate);
    if (segment.activation == nullptr) segment.second_tiles = 0;  // only gate and up are wanted
}

}  // namespace

void launch_forward(ForwardParams params, MlpWeights const& shared, MlpWeights const& routed,
                    LaunchSettings const& settings) {
    DeviceGuard const guard(settings.device);
    if (has_no_tokens(params)) return;
    int const num_ctas = plan_ctas(settings);
    ForwardMaps maps = {};
    fill_segment(params.segments[kRoutedSegment], routed, params.hidden, num_ctas);
    encode_maps(maps, kRoutedSegment, params, routed);
    if (shared.num_experts > 0 && params.num_tokens > 0) {
        fill_segment(params.segments[kSharedSegment], shared, params.hidden, num_ctas);
        encode_maps(maps, kSharedSegment, params, shared);
        params.num_shared_blocks = ceil_div(params.num_tokens, kBlockRows);
    } else {
        disable(params.segments[kSharedSegment]);
    }
    launch_program<Forward>(params, maps, settings);
}

}  // namespace mok
