#include "../kernels/schedule.cuh"

#include "launch.h"
#include "plan.h"

namespace mok {

void launch_schedule(ScheduleParams const& params, LaunchSettings const& settings) {
    DeviceGuard const guard(settings.device);
    int64_t const num_routes = int64_t{params.world_size} * params.token_capacity * params.top_k;
    int const grid = plan_schedule_grid(num_routes, plan_ctas(settings));
    LaunchConfig const config = {grid,     kScheduleThreads,
                                 1,        schedule_shared_bytes(params.num_experts),
                                 grid > 1, reinterpret_cast<cudaStream_t>(settings.stream)};
    launch(schedule_kernel, config, params);
}

}  // namespace mok
