// Publishes this rank's tokens to its peers, and gathers the rows of each block, from here or from peers, into the ring
// that the GEMMs read.
#pragma once

#include "../../device/ptx/copy.cuh"
#include "rank_barrier.cuh"
#include "readiness.cuh"

namespace mok {

// Copies rows through shared memory with the bulk copy engine, which needs no registers for data: a warp has kCopyBytes
// in flight. A batch is loaded by one lane a row, and stored by one lane, for its rows lie one after the other there.
class RowCopier {
  public:
    __device__ __forceinline__ RowCopier(CopyStorage& storage, int row_bytes, WaitReport const& report)
        : storage_(storage), report_(report), row_bytes_(row_bytes), streaming_(ptx::createpolicy_evict_first()) {}

    // Rows in a batch.
    __device__ __forceinline__ int batch_rows() const {
        return row_bytes_ > kCopyBytes ? 1 : min_int(kCopyBytes / row_bytes_, kWarpSize);
    }

    // Starts to load bytes [begin, end) of num_rows rows, each lane r its row `source`.
    __device__ __forceinline__ void load(void const* source, int num_rows, int begin, int end) {
        uint32_t const full = shared_address(&storage_.full);
        int const lane = threadIdx.x % kWarpSize;
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, num_rows * (end - begin));
        __syncwarp();
        if (lane < num_rows) {
            ptx::cp_async_bulk_load(shared_address(storage_.data) + lane * (end - begin),
                                    static_cast<unsigned char const*>(source) + begin, end - begin, full, streaming_);
        }
    }

    // Waits for the load and stores it to `destination`, without waiting for that.
    __device__ __forceinline__ void store(void* destination, int num_rows, int begin, int end) {
        wait_mbarrier(shared_address(&storage_.full), phase_, report_);
        phase_ ^= 1;
        if (threadIdx.x % kWarpSize == 0) {
            ptx::cp_async_bulk_store(static_cast<unsigned char*>(destination) + begin, shared_address(storage_.data),
                                     num_rows * (end - begin));
            ptx::cp_async_bulk_commit_group();
        }
    }

    // Waits until all stores have been made.
    __device__ __forceinline__ void finish() {
        if (threadIdx.x % kWarpSize == 0) ptx::cp_async_bulk_wait_group<0>();
        __syncwarp();
    }

    // All of one batch, done when this returns; `between` runs while the load is under way.
    template <class Between>
    __device__ __forceinline__ void copy(void* destination, void const* source, int num_rows, Between between) {
        int const piece = min_int(row_bytes_, kCopyBytes);
        load(source, num_rows, 0, piece);
        between();
        store(destination, num_rows, 0, piece);
        finish();
        for (int begin = piece; begin < row_bytes_; begin += kCopyBytes) {  // rows longer than the buffer, one by one
            int const end = min_int(begin + kCopyBytes, row_bytes_);
            load(source, num_rows, begin, end);
            store(destination, num_rows, begin, end);
            finish();
        }
    }

  private:
    CopyStorage& storage_;
    WaitReport const& report_;
    int row_bytes_;
    uint64_t streaming_;
    uint32_t phase_ = 0;
};

// One warp of each CTA copies its share of the tokens to where the peers read them.
__device__ __forceinline__ void publish_tokens(MoeParams const& p, RowCopier& copier) {
    int const lane = threadIdx.x % kWarpSize;
    int const batch_rows = copier.batch_rows();
    for (int i = 0; i < p.num_streams; ++i) {
        TokenStream const& stream = p.streams[i];
        for (int first = blockIdx.x * batch_rows; first < p.num_tokens; first += gridDim.x * batch_rows) {
            int const num_rows = min_int(batch_rows, p.num_tokens - first);
            copier.copy(stream.published[p.rank] + int64_t{first} * p.hidden,
                        stream.tokens + int64_t{first + lane} * p.hidden, num_rows, [] {});
        }
    }
    if (lane == 0) ptx::red_release_gpu_add(&p.counters->published_ctas, 1);
}

// Where the token of a routed row lies; source rank and token are packed in the route.
__device__ __forceinline__ bf16 const* token_of_row(MoeParams const& p, TokenStream const& stream, int row) {
    int const token = p.row_route[row] / p.top_k;
    if (p.world_size == 1) return stream.tokens + int64_t{token} * p.hidden;
    int const source = token / p.token_capacity;
    bf16 const* const tokens = source == p.rank ? stream.tokens : stream.published[source];
    return tokens + int64_t{token - source * p.token_capacity} * p.hidden;
}

// Some rows of a block, for one batch of the copier.
struct GatherItem {
    int stream;
    int block;  // -1: none left
    int first_row;
    int num_rows;
    bf16 const* source;  // of this lane's row
};

// Takes the next rows, stream after stream, in the order in which the GEMMs will ask. A batch is a small part of a
// block, so that all SMs work on the first block and it is there soon.
__device__ __forceinline__ GatherItem next_gather_item(MoeParams const& p, int num_blocks, int batch_rows) {
    int const lane = threadIdx.x % kWarpSize;
    int const items_per_block = ceil_div(kBlockRows, batch_rows);
    for (;;) {
        int item = lane == 0 ? ptx::atom_relaxed_gpu_add(&p.counters->next_gather, 1) : 0;
        item = __shfl_sync(0xFFFFFFFFu, item, 0);
        if (item >= p.num_streams * num_blocks * items_per_block) return {0, -1, 0, 0, nullptr};
        int const stream = item / (num_blocks * items_per_block);
        int const block = item / items_per_block - stream * num_blocks;
        BlockEntry const entry = p.blocks[block];
        int const first = item % items_per_block * batch_rows;
        int const num_rows = min_int(batch_rows, padded_rows(p, entry.num_rows) - first);
        if (num_rows <= 0) continue;
        int const row = first + min_int(lane, num_rows - 1);
        bf16 const* const source =
            row < entry.num_rows ? token_of_row(p, p.streams[stream], entry.first_row + row) : p.zero_row;
        return {stream, block, first, num_rows, source};
    }
}

// Waits until the tiles that read the block which held this slot of the ring are done.
__device__ __forceinline__ void wait_input_slot(MoeParams const& p, int block, WaitReport const& report) {
    SegmentParams const& segment = p.segments[kRoutedSegment];
    int const previous = block - segment.ring_blocks;
    if (previous < 0) return;
    wait_at_least(&segment.first_done[previous], stores_of_block(p.blocks[previous].num_rows, segment.first_tiles),
                  kRingTimeout, previous, report);
}

// While one item is loaded, the item before is reported, the next one is looked up, and the slot is waited for.
__device__ __forceinline__ void gather_rows(MoeParams const& p, RowCopier& copier, WaitReport const& report) {
    auto const report_item = [&](GatherItem const& item) {
        if (item.num_rows > 0 && threadIdx.x % kWarpSize == 0) {
            ptx::red_release_gpu_add(&p.streams[item.stream].gathered[item.block], item.num_rows);
        }
    };
    int const num_blocks = num_routed_blocks(p);
    GatherItem previous = {};
    GatherItem item = next_gather_item(p, num_blocks, copier.batch_rows());
    while (item.block >= 0) {
        GatherItem next;
        int64_t const slot = ring_row(p.segments[kRoutedSegment], item.block) + item.first_row;
        copier.copy(p.streams[item.stream].rows + slot * p.hidden, item.source, item.num_rows, [&] {
            report_item(previous);
            next = next_gather_item(p, num_blocks, copier.batch_rows());
            wait_input_slot(p, item.block, report);
        });
        previous = item;
        item = next;
    }
    report_item(previous);
}

}  // namespace mok
