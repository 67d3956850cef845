// Shared memory of the persistent kernel, stated once.
#pragma once

#include "../common/tensor_maps.h"
#include "../device/epilogue/store_rows.cuh"
#include "tile_task.cuh"

namespace mok {

constexpr int kTileBytesA = kTileRows * kTileRowBytes;
constexpr int kTileBytesB = kTileColumns * kTileRowBytes;
constexpr int kHelperWarps = kWarpgroupThreads / kWarpSize;
constexpr int kLoadWarps = 1;

// Staging of the bulk copies that one background thread makes.
constexpr int kCopyBytes = 16384;
struct CopyStorage {
    alignas(128) unsigned char data[kCopyBytes];
    uint64_t full;
};

struct SharedStorage {
    alignas(1024) unsigned char a[kStages][kTileBytesA];
    alignas(1024) unsigned char b[kStages][kTileBytesB];
    alignas(128) unsigned char staging[kMmaWarps][kStripBytes];
    CopyStorage copy;
    Task tasks[kTaskSlots];
    RingBarriers<kStages> tiles;
    RingBarriers<kTaskSlots> task_ring;
    bool is_last_cta;

    // Arrival counts follow from who takes part: one thread announces the bytes of a stage; every MMA warp of every CTA
    // that the multicast writes to must let go of it; all readers of a task in the cluster free its slot, which the
    // first CTA's scheduler refills.
    __device__ __forceinline__ void init(bool is_leader) {
        if (is_leader) {
            tiles.init(1, kMmaWarps * kClusterSize);
            task_ring.init(1, (kLoadWarps + kMmaWarps) * kClusterSize);
            ptx::mbarrier_init(shared_address(&copy.full), 1);
            ptx::fence_mbarrier_init();
        }
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
};

static_assert(sizeof(SharedStorage) <= 227 * 1024, "stages and staging must fit the shared memory of an SM");

// Reads the scheduler's tasks in order, one per call, a whole warp at a time.
class TaskReader {
  public:
    __device__ __forceinline__ bool is_ready(SharedStorage const& storage) const {
        return storage.task_ring.is_full(at_);
    }
    // False when there is no further task.
    __device__ __forceinline__ bool next(SharedStorage& storage, WaitReport const& report, Task& task) {
        storage.task_ring.wait(at_, report);
        task = storage.tasks[at_.slot()];
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) storage.task_ring.release_in(at_.slot(), 0);
        at_.advance();
        return task.kind != kLastTask;
    }

  private:
    RingPosition<kTaskSlots> at_;
};

}  // namespace mok
