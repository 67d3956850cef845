// The TMA descriptors of a launch, each by segment.
#pragma once

#include <cuda.h>

namespace mok {

struct ForwardMaps {
    CUtensorMap input[2];       // rows of x: the gathered ring, or x itself for the shared expert
    CUtensorMap activation[2];  // the activation ring
    CUtensorMap gate[2];        // [experts, rows, depth], as up and down
    CUtensorMap up[2];
    CUtensorMap down[2];
};

struct BackwardMaps {
    CUtensorMap d_output[2];  // rows of the output's gradient, gathered or those of the shared expert's tokens
    CUtensorMap input[2];     // the same of x
    CUtensorMap d_gate[2];    // the halves of d_gate_up
    CUtensorMap d_up[2];
    CUtensorMap activation[2];  // times the router weight
    CUtensorMap gate[2];        // [experts, rows, depth], as up and down
    CUtensorMap up[2];
    CUtensorMap down[2];
};

}  // namespace mok
