// How a problem is spread over the GPU: pure functions of its sizes, so that they can be printed and tested without
// one.
#pragma once

#include "../common/params.h"
#include "moe.h"

namespace mok {

// CTAs of a launch of the persistent kernel: whole clusters.
int plan_ctas(LaunchSettings const& settings);

void apply_plan(SegmentParams& segment, SegmentPlan const& plan, int intermediate);

// A segment without blocks.
void disable(SegmentParams& segment);

}  // namespace mok
