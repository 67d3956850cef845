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

// How the row blocks of a segment are worked on.
struct SegmentPlan {
    int first_tiles;
    int second_tiles;
    int chunk_blocks;
    int group_blocks;
    int ring_blocks;
};
SegmentPlan plan_forward(int hidden, int intermediate, int num_sms);
SegmentPlan plan_backward(int hidden, int intermediate, int num_sms);

int plan_schedule_grid(int64_t num_routes, int num_sms);
int device_num_sms(int device);

void launch_schedule(ScheduleParams const& params, LaunchSettings const& settings);
void launch_forward(ForwardParams params, MlpWeights const& shared, MlpWeights const& routed,
                    LaunchSettings const& settings);
void launch_backward(BackwardParams params, MlpWeights const& shared, MlpWeights const& routed,
                     LaunchSettings const& settings);

}  // namespace mok
