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
    kFirstGemmTimeout = 1,  // a tile waited for the first GEMM of its block
    kRingTimeout = 2,       // a tile waited for its slot of the activation ring
    kGatherTimeout = 3,     // a tile waited for its gathered rows
    kCombineTimeout = 4,    // a token waited for the second GEMM of its rows
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
    int32_t* expert_blocks;            // [num_local_experts + 1] first block of each expert
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
constexpr int kRankBarriers = 2;  // between the ranks in one launch: after publishing, after the last push

// One group of MLPs over row blocks: the shared expert (may be empty) or the routed experts. A block has two GEMMs, the
// second on what the first one stores: gate+up and down in forward, the gradients through down and through gate+up in
// backward.
struct SegmentParams {
    bf16* gate_up;           // [gate_up_rows, 2 * intermediate], written by forward and read by backward; may be null
    int64_t gate_up_rows;    // forward drops the rows beyond
    bool gate_up_in_blocks;  // it has kBlockRows rows a block of the launch, not those of the schedule
    int32_t intermediate;
    int32_t first_tiles;  // column tiles of the first GEMM
    int32_t second_tiles;
    int32_t chunk_blocks;
    int32_t group_blocks;
    int32_t ring_blocks;    // blocks that the buffers between the stages hold
    uint32_t* first_done;   // [blocks] warps' stores of finished tiles of the first GEMM
    uint32_t* second_done;  // [blocks] the same for the second
    bf16* activation;       // forward: ring [ring_blocks * kBlockRows, intermediate], or null: gate and up are enough
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

// Values of tokens that are gathered into rows: x in forward, the gradient of the output and x in backward.
struct TokenStream {
    bf16 const* tokens;          // [num_tokens, hidden] of this rank
    bf16* published[kMaxRanks];  // each rank's [token_capacity, hidden]; unused at world_size 1
    bf16* rows;                  // ring [ring_blocks * kBlockRows, hidden] of the routed segment
    uint32_t* gathered;          // [blocks] rows that are in the ring
};
constexpr int kMaxStreams = 2;

// What forward and backward have in common.
struct MoeParams {
    SegmentParams segments[2];
    TokenStream streams[kMaxStreams];
    int32_t num_streams;
    bf16 const*
        zero_row;  // [hidden] of zeros for the rows that pad an expert to a multiple of kTileDepth; null: no pad
    int32_t num_shared_blocks;
    // The launch works on the routed blocks [first_block, first_block + most_blocks), those of them that exist.
    int32_t first_block;
    int32_t most_blocks;
    int32_t const* num_routed_blocks;  // [1] of all
    BlockEntry const* blocks;          // from first_block on
    int32_t const* row_route;
    int32_t const* route_row;       // [num_tokens, top_k]
    float const* route_weights;     // [num_tokens, top_k] in the sum over a token's routes; null: all 1
    bf16* output;                   // [num_tokens, hidden], or null: no sum
    bf16* shared_output;            // [num_tokens, hidden] or null
    bf16* route_output[kMaxRanks];  // each rank's [token_capacity * top_k, hidden]: one slot a route, one writer a slot
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
    // A launch does any of: publish tokens to symmetric memory; pull, GEMMs and push; combine. Virtual ranks meet on
    // the host between the three.
    bool publish;
    bool gemm;
    bool combine;
    bool combine_by_row;  // each token as soon as its rows are done: all rows are this launch's and this rank's
    bool device_barriers;
};

struct ForwardParams : MoeParams {};

enum WeightGradientMode : int32_t { kWriteBf16 = 0, kAddBf16 = 1, kAddFloat = 2 };

// A weight gradient [experts, rows, columns], columns contiguous, strides in elements; null data: not wanted.
struct WeightGradient {
    void* data;
    int64_t expert_stride;
    int64_t row_stride;
    int32_t mode;  // WeightGradientMode
};

// What backward computes for a segment. Buffers have the rows of the ring.
struct SegmentGradients {
    bf16* d_gate_up;        // [rows, 2 * intermediate], or null: neither d_x nor gradients of gate and up are wanted
    bf16* activation;       // [rows, intermediate], times the router weight; null: no gradient of down is wanted
    float* d_weight_parts;  // [rows, first_tiles] of the router gradient, or null
    WeightGradient gate;
    WeightGradient up;
    WeightGradient down;
};

struct BackwardParams : MoeParams {
    SegmentGradients gradients[2];
    int32_t const* expert_blocks;  // [num_local_experts + 1] first block of each expert
    bool needs_d_x;                // a rank without tokens has no output, but may have rows of others
    int32_t num_local_experts;
    float const* router_weights[kMaxRanks];  // each rank's [num_tokens, top_k]
    float* d_router_weights[kMaxRanks];      // each rank's [token_capacity * top_k]
    // Accumulators [tiles of one expert, kClusterSize, kTileRows * kTileColumns] of the expert that the launch before
    // has begun, and room for those of the one that the next launch goes on with; null where there is no such launch.
    float const* accumulators_in;
    float* accumulators_out;
};

}  // namespace mok
