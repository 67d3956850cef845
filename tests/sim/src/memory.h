// Address spaces, known allocations and the shadow that finds races, uninitialised reads and missing proxy fences.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "order.h"

namespace moksim {

using Addr = uint64_t;

// Generic addresses: global ones are host pointers; the shared and local windows are addresses that no host has.
// A shared address is (rank in the cluster << 24) + offset, so a CTA's own addresses are valid shared::cluster ones.
constexpr Addr kSharedWindow = 0x60ull << 56;
constexpr Addr kLocalWindow = 0x61ull << 56;
constexpr int kSharedRankShift = 24;
constexpr uint32_t kSharedOffsetMask = (1u << kSharedRankShift) - 1;
constexpr uint32_t kSharedReserved = 1024;  // sm_90 keeps the first KB of shared memory for itself
constexpr uint32_t kSharedMax = 233472;     // 228 KB an SM; a CTA gets at most 227

// What an access is, as bits. kStrong: relaxed, acquire, release, volatile or atomic (PTX ISA 8.7).
enum AccessKind : uint8_t {
    kRead = 0,
    kWrite = 1,
    kStrong = 2,
    kAsync = 4,       // through the async proxy
    kReadOnly = 8,    // ld.global.nc: nobody may write this while the kernel runs
    kAnyContent = 16  // may read what nobody has written: copies pass that on, see copy_initialized
};

// Who accesses, from which instruction, and what had been seen when the access was ordered.
struct Actor {
    Entity entity = 0;
    uint32_t clock = 0;
    const Order* order = nullptr;
    uint32_t op = 0;
};

constexpr int kGranule = 16;       // bytes per shadow cell
constexpr int kCellEntries = 4;    // accesses remembered per cell
constexpr int kShadowPage = 4096;  // bytes whose cells are allocated together

struct ShadowEntry {
    uint32_t clock;
    Entity entity;
    uint16_t bytes;  // mask
    uint32_t op : 24, kind : 8;
};

struct ShadowCell {
    ShadowEntry entries[kCellEntries];
    uint32_t generation;  // entries of an older generation happened before everything that runs now
    uint16_t initialized;
    uint8_t count, victim;
};

// One allocation: a tensor, a device variable, a parameter buffer or the shared memory of a CTA.
struct Region {
    Addr base = 0;
    uint64_t size = 0;
    uint8_t* host = nullptr;
    std::string name;
    bool is_read_only = false;
    bool is_initialized = true;  // if not, reads before writes are errors
    std::vector<std::unique_ptr<ShadowCell[]>> pages;

    ShadowCell& cell(uint64_t offset);
    bool contains(Addr address, uint64_t bytes) const {
        return address >= base && address - base <= size && bytes <= size - (address - base);
    }
};

// A release pattern's place in memory (8.8): what an acquire that reads it sees.
struct SyncVariable {
    Order order;
    int scope = 0;                                  // widest scope of the last release
    const void *cta = nullptr, *cluster = nullptr;  // of the releasing thread
    int rank = 0;
};

class Memory {
  public:
    void add(Addr base, uint64_t size, const std::string& name, bool is_read_only = false, bool is_initialized = true);
    void remove(Addr base);
    Region* find(Addr address);  // nullptr if unknown
    std::string describe(Addr address);

    std::unordered_map<Addr, SyncVariable> sync_variables;

  private:
    std::map<Addr, std::unique_ptr<Region>> regions_;
    Region* last_ = nullptr;
};

struct Machine;

// Records the access in the shadow and reports conflicts with what is there. The range must lie in the region.
void check_access(Machine& machine, Region& region, uint64_t offset, uint64_t bytes, uint8_t kind, const Actor& actor);

// After a copy: the bytes of `to` that came from bytes nobody has written count as unwritten again.
void copy_initialized(Region& from, uint64_t from_offset, Region& to, uint64_t to_offset, uint64_t bytes);

}  // namespace moksim
