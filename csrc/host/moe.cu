#include "moe.h"

#include "../kernels/moe/forward.cuh"
#include "../kernels/schedule.cuh"
#include "launch.h"

namespace mok {

SegmentPlan plan_segment(int hidden, int intermediate, int num_sms) {
    SegmentPlan plan;
    plan.gate_up_tiles = ceil_div(intermediate, kGateUpColumns);
    plan.down_tiles = ceil_div(hidden, kTileColumns);
    // A chunk's tiles of either kind must keep every cluster busy once over, and a half more, so that the tiles before
    // are finished when they are needed.
    int const num_clusters = num_sms / kClusterSize;
    plan.chunk_blocks = ceil_div(num_clusters + num_clusters / 2, min_int(plan.gate_up_tiles, plan.down_tiles));
    plan.ring_blocks = plan.chunk_blocks * kRingChunks;
    return plan;
}

int plan_schedule_grid(int64_t num_routes, int num_sms) {
    constexpr int64_t kRoutesPerCta = 2048;
    int64_t const wanted = (num_routes + kRoutesPerCta - 1) / kRoutesPerCta;
    return static_cast<int>(wanted < 1 ? 1 : wanted > num_sms ? num_sms : wanted);
}

int device_num_sms(int device) {
    int num_sms = 0;
    MOK_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    return num_sms;
}

namespace {

int resolve_num_sms(LaunchSettings const& settings) {
    int const available = device_num_sms(settings.device);
    int const wanted = settings.num_sms > 0 ? min_int(settings.num_sms, available) : available;
    return wanted / kClusterSize * kClusterSize > 0 ? wanted / kClusterSize * kClusterSize : kClusterSize;
}

void encode_maps(TensorMaps& maps, int segment, MlpWeights const& weights, int hidden) {
    maps.gate[segment] = encode_weight(weights.gate, weights.num_experts, weights.intermediate, hidden, kGateUpColumns);
    maps.up[segment] = encode_weight(weights.up, weights.num_experts, weights.intermediate, hidden, kGateUpColumns);
    maps.down[segment] =
        encode_weight(weights.down, weights.num_experts, hidden, weights.intermediate, kTileColumns / 2);
}

void fill_segment(SegmentParams& segment, MlpWeights const& weights, int hidden, int num_sms) {
    SegmentPlan const plan = plan_segment(hidden, weights.intermediate, num_sms);
    segment.intermediate = weights.intermediate;
    segment.gate_up_tiles = plan.gate_up_tiles;
    segment.down_tiles = plan.down_tiles;
    segment.chunk_blocks = plan.chunk_blocks;
    segment.ring_blocks = plan.ring_blocks;
}

}  // namespace

void launch_schedule(ScheduleParams const& params, LaunchSettings const& settings) {
    DeviceGuard const guard(settings.device);
    int64_t const num_routes = int64_t{params.world_size} * params.token_capacity * params.top_k;
    int const grid = plan_schedule_grid(num_routes, resolve_num_sms(settings));
    LaunchConfig const config = {grid,     kScheduleThreads,
                                 1,        schedule_shared_bytes(params.num_experts),
                                 grid > 1, reinterpret_cast<cudaStream_t>(settings.stream)};
    launch(schedule_kernel, config, params);
}

void launch_forward(ForwardParams params, MlpWeights const& shared, MlpWeights const& routed,
                    LaunchSettings const& settings) {
    DeviceGuard const guard(settings.device);
    int const num_sms = resolve_num_sms(settings);
    TensorMaps maps = {};
    fill_segment(params.segments[kRoutedSegment], routed, params.hidden, num_sms);
    encode_maps(maps, kRoutedSegment, routed, params.hidden);
    if (shared.num_experts > 0) {
        fill_segment(params.segments[kSharedSegment], shared, params.hidden, num_sms);
        encode_maps(maps, kSharedSegment, shared, params.hidden);
        params.num_shared_blocks = ceil_div(params.num_tokens, kBlockRows);
    } else {
        params.segments[kSharedSegment].chunk_blocks = 1;
        params.num_shared_blocks = 0;
    }
    // Ranks wait for each other inside the launch only with device barriers: then every CTA must be resident.
    LaunchConfig const config = {num_sms,
                                 kThreads,
                                 kClusterSize,
                                 static_cast<int>(sizeof(SharedStorage)),
                                 params.device_barriers,
                                 reinterpret_cast<cudaStream_t>(settings.stream)};
    launch(persistent_kernel<Forward>, config, params, maps);
}

}  // namespace mok
