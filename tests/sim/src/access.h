// Memory as instructions see it: address spaces, bounds, and the orderings of strong accesses.
#pragma once

#include "machine.h"

namespace moksim {

enum Space : uint8_t { kGenericSpace, kGlobalSpace, kSharedSpace, kLocalSpace };
enum Semantics : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum Scope : uint8_t { kScopeCta, kScopeCluster, kScopeGpu, kScopeSys };

// A resolved address range.
struct Place {
    uint8_t* host = nullptr;
    Region* region = nullptr;  // nullptr: local memory, or unknown memory that the configuration allows
    uint64_t offset = 0;       // in the region
    Cta* cta = nullptr;        // whose shared memory it is, if it is
};

// Aborts the launch with a report if the range is not accessible or not aligned to `align`.
Place resolve(Warp& w, const Op& op, Space space, Addr address, uint64_t bytes, uint64_t align, bool writes,
              int lane = 0);

// The CTA of the warp's cluster whose shared memory the shared::cluster address names.
Cta& cta_of(Warp& w, const Op& op, uint32_t shared_address);

// A strong access of `place` as a synchronisation: what it releases into it and acquires from it (PTX ISA 8.8, 8.9).
void release_to(Warp& w, const Place& place, Semantics semantics, Scope scope, bool is_rmw);
void acquire_from(Warp& w, const Place& place, Semantics semantics, Scope scope);
void fence(Warp& w, Scope scope, bool acquires, bool releases);

}  // namespace moksim
