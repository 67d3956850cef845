#include "plan.h"

#include "../common/task_order.h"
#include "cuda_check.h"

namespace mok {
namespace {

// A chunk is one wave of tiles of the first GEMM, so that each input row is read from memory by one wave only; where a
// row block has more tiles than that, a patch of eight blocks, which reuses each weight tile eight times.
SegmentPlan plan_tiles(int first_tiles, int second_tiles, int num_sms) {
    constexpr int kLeastBlocks = 6;
    constexpr int kPatchBlocks = 8;
    SegmentPlan plan = {};
    plan.first_tiles = first_tiles;
    plan.second_tiles = second_tiles;
    int const wave_blocks = num_sms / kClusterSize / first_tiles;
    plan.chunk_blocks = wave_blocks >= kLeastBlocks ? wave_blocks : kPatchBlocks;
    plan.group_blocks = plan.chunk_blocks < 2 * kPatchBlocks ? plan.chunk_blocks : kPatchBlocks;
    return plan;
}

}  // namespace

SegmentPlan plan_forward(int hidden, int intermediate, int num_sms) {
    SegmentPlan plan = plan_tiles(ceil_div(intermediate, kGateUpColumns), ceil_div(hidden, kTileColumns), num_sms);
    // Three chunks keep these waits empty: a gate+up tile may overwrite a block of activations only when the down tiles
    // of the block that was there are done, and the input ring holds the chunk in use and what is gathered ahead. A
    // longer ring would fall out of L2 before it is read: with four chunks of 1.5 waves, three times the bytes came
    // from memory.
    plan.ring_blocks = plan.chunk_blocks * 3;
    return plan;
}

SegmentPlan plan_backward(int hidden, int intermediate, int num_sms) {
    return plan_tiles(ceil_div(intermediate, kTileColumns), ceil_div(hidden, kTileColumns), num_sms);
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

int plan_ctas(LaunchSettings const& settings) {
    int const available = device_num_sms(settings.device);
    int const wanted = settings.num_sms > 0 ? min_int(settings.num_sms, available) : available;
    return wanted / kClusterSize * kClusterSize > 0 ? wanted / kClusterSize * kClusterSize : kClusterSize;
}

void apply_plan(SegmentParams& segment, SegmentPlan const& plan, int intermediate) {
    segment.intermediate = intermediate;
    segment.first_tiles = plan.first_tiles;
    segment.second_tiles = plan.second_tiles;
    segment.chunk_blocks = plan.chunk_blocks;
    segment.group_blocks = plan.group_blocks;
    segment.ring_blocks = plan.ring_blocks;
}

void disable(SegmentParams& segment) {
    segment.chunk_blocks = segment.group_blocks = segment.ring_blocks = 1;
}

}  // namespace mok
