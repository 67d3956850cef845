// The TMA descriptors of a launch.
#pragma once

#include <cuda.h>

namespace mok {

struct TensorMaps {             // by segment
    CUtensorMap input[2];       // rows of x: the gathered ring, or x itself for the shared expert
    CUtensorMap activation[2];  // the activation ring
    CUtensorMap gate[2];        // [experts, rows, depth], as up and down
    CUtensorMap up[2];
    CUtensorMap down[2];
};

}  // namespace mok
