// What the host hands to the kernels. Every pointer is device memory unless it says otherwise; shapes are in brackets.
#pragma once

#include <cstdint>

#include "config.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#else
struct __nv_bfloat16;
#endif

namespace mok {

using bf16 = __nv_bfloat16;

// First failed wait of a launch, in pinned host memory. `code` is written last.
struct ErrorRecord {
    int32_t code;  // ErrorCode; 0 while all is well
    int32_t rank;
    int32_t cta;
    int32_t task;      // row block, or peer rank for a barrier
    int64_t expected;  // value that the counter had to reach
    int64_t seen;
};

enum ErrorCode : int32_t {
    kNoError = 0,
    kGateUpTimeout = 1,     // a down tile waited for the gate+up tiles of its block
    kRingTimeout = 2,       // a gate+up tile waited for its slot of the activation ring
    kGatherTimeout = 3,     // a gate+up tile waited for its gathered rows
    kCombineTimeout = 4,    // a token waited for its down tiles
    kBarrierTimeout = 5,    // a rank waited for a peer
    kPipelineTimeout = 6,   // a wait inside one CTA
    kGridTimeout = 7,       // the schedule kernel waited for its own CTAs
    kScheduleOverflow = 8,  // more routed rows than the schedule holds
    kExpertOutOfRange = 9,  // an id outside [-1, num_experts)
};

struct BlockEntry {  // one row block of the routed rows: up to kBlockRows rows of one expert
    int32_t expert;
    int32_t first_row;
    int32_t num_rows;
    int32_t unused;
};

struct ScheduleParams {
    void const* top_experts;  // [num_tokens, top_k] int32 or int64, -1 = dropped
    int32_t id_bytes;
    int32_t num_tokens;
    int32_t token_capacity;  // equal on all ranks
    int32_t top_k;
    int32_t num_experts;
    int32_t num_local_experts;
    int32_t rank;
    int32_t world_size;
    int64_t row_capacity;
    int32_t* gathered_ids[kMaxRanks];  // each rank's [world_size, token_capacity * top_k]; unused at world_size 1
    int32_t* expert_offsets;           // [num_local_experts + 1]
    int32_t* row_route;                // [row_capacity]
    int32_t* route_row;                // [num_tokens, top_k]
    int32_t* route_rank;               // [num_tokens, top_k]
    BlockEntry* blocks;                // [row_capacity / kBlockRows + num_local_experts]
    int32_t max_blocks;                // room in blocks
    int32_t* num_blocks;               // [1]
    int32_t* segment_counts;           // scratch [grid, num_experts]
    uint32_t* grid_barrier;            // [2] of the launch's own CTAs, zero before the first launch
    uint32_t* error_claims;            // [1], zero before the first launch
    ErrorRecord* error;
    int64_t timeout_ns;
    bool publish;  // write the ids to the peers
    bool sort;     // build the tables
};

constexpr int kSharedSegment = 0;
constexpr int kRoutedSegment = 1;
constexpr int kRankBarriers = 2;  // between the ranks in one launch: after publishing x, after the last push

// One group of MLPs over row blocks: the shared expert (may be empty) or the routed experts.
struct SegmentParams {
    bf16* activation;  // ring [ring_blocks * kBlockRows, intermediate]
    bf16* gate_up;     // kept for backward [gate_up_rows, 2 * intermediate], or null
    int64_t gate_up_rows;
    int32_t intermediate;
    int32_t gate_up_tiles;
    int32_t down_tiles;
    int32_t chunk_blocks;
    int32_t group_blocks;
    int32_t ring_blocks;     // of the activation and of gathered_x
    uint32_t* gate_up_done;  // [blocks] warps' stores of finished gate+up tiles
    uint32_t* down_done;     // [blocks] the same for down tiles
};

// Counters of one launch; the last CTA to leave sets them back to zero.
struct LaunchCounters {
    uint32_t next_task;
    uint32_t next_combine;
    uint32_t finished_ctas;
    uint32_t gemm_finished_warps;
    uint32_t published_ctas;
    uint32_t barrier_generation;
    uint32_t next_gather;
    uint32_t error_claims;
};

struct ForwardParams {
    SegmentParams segments[2];
    int32_t num_shared_blocks;
    int32_t const* num_routed_blocks;  // [1]
    BlockEntry const* blocks;
    int32_t const* row_route;
    int32_t const* route_row;       // [num_tokens, top_k]
    float const* router_weights;    // [num_tokens, top_k]
    bf16 const* x;                  // [num_tokens, hidden]
    bf16* output;                   // [num_tokens, hidden]
    bf16* shared_output;            // [num_tokens, hidden] or null
    bf16* route_output[kMaxRanks];  // each rank's [token_capacity * top_k, hidden]: one slot a route, one writer a slot
    bf16* published_x[kMaxRanks];   // each rank's [token_capacity, hidden]; unused at world_size 1
    bf16* gathered_x;               // ring [ring_blocks * kBlockRows, hidden] of the routed segment
    uint32_t* gathered;             // [blocks] rows that are in the ring
    uint32_t* flags[kMaxRanks];     // each rank's [world_size] barrier generations
    LaunchCounters* counters;
    uint32_t* block_counters;  // all counters per block, contiguous, for clearing
    int32_t num_block_counters;
    ErrorRecord* error;
    int64_t timeout_ns;
    float swiglu_limit;
    int32_t num_tokens;
    int32_t token_capacity;
    int32_t top_k;
    int32_t hidden;
    int32_t rank;
    int32_t world_size;
    // A launch does any of: publish x to symmetric memory; pull, GEMMs and push; combine. Virtual ranks meet on the
    // host between the three.
    bool publish;
    bool gemm;
    bool combine;
    bool device_barriers;
};

}  // namespace mok
