// What the C interface for Python shares with the CUDA runtime stub.
#pragma once

#include <cstdint>

#include "machine.h"

namespace moksim {

// The virtual device of this host thread: launches of different ranks run at the same time.
void set_host_rank(int rank);
uint64_t queue_of(const void* stream);
// The PTX of one kernel's source file that the linked host code brought along (the kernel's name contains `kernel`),
// and another text in its place.
std::string embedded_ptx(const std::string& kernel);
void replace_ptx(const std::string& kernel, const std::string& text);
void* tensor_map_encoder();  // cuTensorMapEncodeTiled

}  // namespace moksim
