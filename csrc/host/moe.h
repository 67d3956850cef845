// Launch functions of the mixture-of-experts kernels: plain values in, no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/params.h"
#include "tensor_map.h"

namespace mok {

// What a launch needs beside the kernel's own parameters.
struct LaunchSettings {
    int device = 0;
    uint64_t stream = 0;
    int num_sms = 0;  // CTAs to use; 0 = all of the device
};

struct MlpWeights {
    MatrixView gate;
    MatrixView up;
    MatrixView down;
    int num_experts = 0;
    int intermediate = 0;
};

// How a forward of these sizes runs; a pure function of the problem, so that it can be printed and tested without a
// GPU.
struct SegmentPlan {
    int gate_up_tiles;
    int down_tiles;
    int chunk_blocks;
    int group_blocks;
    int ring_blocks;
};
SegmentPlan plan_segment(int hidden, int intermediate, int num_sms);

// CTAs of the schedule kernel for so many routes: enough for a few thousand routes each.
int plan_schedule_grid(int64_t num_routes, int num_sms);

int device_num_sms(int device);

void launch_schedule(ScheduleParams const& params, LaunchSettings const& settings);
void launch_forward(ForwardParams params, MlpWeights const& shared, MlpWeights const& routed,
                    LaunchSettings const& settings);

}  // namespace mok
