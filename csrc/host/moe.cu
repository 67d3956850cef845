#include "moe.h"

#include "../kernels/moe/forward.cuh"
#include "../kernels/schedule.cuh"
#include "launch.h"

namespace mok {

SegmentPlan plan_segment(int hidden, int intermediate, int num_sms) {
    SegmentPlan plan;
    plan.gate_up_tiles = ceil_div(intermediate, kGateUpColumns);
    plan.down_tiles = ceil_div(hidden, kTileColumns);
    // A chunk is one wave of gate+up tiles, so that each input row is read from memory by one wave only; where a row
    // block has more tiles than that, a patch of eight blocks, which reuses each weight tile eight times.
    constexpr int kLeastBlocks = 6;
    constexpr int kPatchBlocks = 8;
    int const wave_blocks = num_sms / kClusterSize / plan.gate_up_tiles;
    plan.chunk_blocks = wave_blocks >= kLeastBlocks ? wave_blocks : kPatchBlocks;
    plan.group_blocks = plan.chunk_blocks < 2 * kPatchBlocks ? plan.chunk_blocks : kPatchBlocks;
    // Three chunks keep these waits empty: a gate+up tile may overwrite a block of activations only when the down tiles
    // of the block that was there are done, and the input ring holds the chunk in use and what is gathered ahead. A
    // longer ring would fall out of L2 before it is read: with four chunks of 1.5 waves, three times the bytes came
    // from memory.
    plan.ring_blocks = plan.chunk_blocks * 3;
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

void encode_maps(TensorMaps& maps, int segment, ForwardParams const& params, MlpWeights const& weights) {
    int const hidden = params.hidden;
    int const experts = weights.num_experts;
    maps.gate[segment] = encode_matrix(weights.gate, experts, weights.intermediate, hidden, kGateUpColumns);
    maps.up[segment] = encode_matrix(weights.up, experts, weights.intermediate, hidden, kGateUpColumns);
    maps.down[segment] = encode_matrix(weights.down, experts, hidden, weights.intermediate, kTileColumns / 2);
    SegmentParams const& s = params.segments[segment];
    int const ring_rows = s.ring_blocks * kBlockRows;
    auto const rows = [](bf16 const* data, int width) {
        return MatrixView{reinterpret_cast<uint64_t>(data), int64_t{width} * kTileRows, width};
    };
    maps.activation[segment] =
        encode_matrix(rows(s.activation, weights.intermediate), 1, ring_rows, weights.intermediate, kTileRows);
    bool const is_routed = segment == kRoutedSegment;
    maps.input[segment] = encode_matrix(rows(is_routed ? params.gathered_x : params.x, hidden), 1,
                                        is_routed ? ring_rows : params.num_tokens, hidden, kTileRows);
}

void fill_segment(SegmentParams& segment, MlpWeights const& weights, int hidden, int num_sms) {
    SegmentPlan const plan = plan_segment(hidden, weights.intermediate, num_sms);
    segment.intermediate = weights.intermediate;
    segment.gate_up_tiles = plan.gate_up_tiles;
    segment.down_tiles = plan.down_tiles;
    segment.chunk_blocks = plan.chunk_blocks;
    segment.group_blocks = plan.group_blocks;
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
    // No rank has tokens: nothing to do, and no buffers to describe. Other ranks may have some where this one has none.
    if ((params.world_size == 1 ? params.num_tokens : params.token_capacity) == 0) return;
    encode_maps(maps, kRoutedSegment, params, routed);
    if (shared.num_experts > 0 && params.num_tokens > 0) {
        fill_segment(params.segments[kSharedSegment], shared, params.hidden, num_sms);
        encode_maps(maps, kSharedSegment, params, shared);
        params.num_shared_blocks = ceil_div(params.num_tokens, kBlockRows);
    } else {
        params.segments[kSharedSegment].chunk_blocks = params.segments[kSharedSegment].group_blocks = 1;
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
