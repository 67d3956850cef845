// Exchange and agreement among the lanes of a warp (PTX ISA 9.7.9.6, 9.7.13.2, 9.7.13.8 to 9.7.13.12).
#include <bit>

#include "isa.h"

namespace moksim {
namespace {

// Waits until the lanes of `members` are here; an executing lane outside of them is an error.
bool is_converged(Warp& w, const Op& op, uint32_t mask, uint32_t members) {
    if (mask & ~members)
        Machine::get().fatal(
            "barrier", format("lanes %08x execute this without being in its member mask %08x", mask, members), &w, &op);
    if (members & ~(w.live | mask) & (Machine::get().config.checks & kCheckBarrier ? kAllLanes : 0))
        Machine::get().fatal(
            "barrier", format("member mask %08x names lanes that have exited (live: %08x)", members, w.live), &w, &op);
    w.barrier_mask = members;
    return !(members & w.live & ~w.mask);
}

enum ShuffleMode { kUp, kDown, kBfly, kIdx };

template <ShuffleMode kMode>
Status shuffle(Warp& w, const Op& op, uint32_t mask) {  // 9.7.9.6
    const uint32_t members = w.at<uint32_t>(w.program->ext[op.ext])[__builtin_ctz(mask)];
    if (!is_converged(w, op, mask, members)) return Status::kConverge;
    const auto *a = w.at<uint32_t>(op.a), *b = w.at<uint32_t>(op.b), *c = w.at<uint32_t>(op.c);
    uint32_t r[kLanes] = {}, valid = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const int offset = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
        const int max_lane = (lane & segment) | (clamp & ~segment), min_lane = lane & segment;
        int from = kMode == kUp     ? lane - offset
                   : kMode == kDown ? lane + offset
                   : kMode == kBfly ? lane ^ offset
                                    : min_lane | (offset & ~segment);
        const bool is_valid = kMode == kUp ? from >= max_lane : from <= max_lane;
        if (!is_valid) from = lane;
        if (!(mask >> from & 1))
            Machine::get().fatal("barrier", format("lane %d reads lane %d, which does not take part", lane, from), &w,
                                 &op);
        r[lane] = a[from];
        valid |= static_cast<uint32_t>(is_valid) << lane;
    }
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    w.set_predicate(op.pq, valid, mask);
    return Status::kNext;
}

void decode_shfl(Decoder& d) {
    if (!d.take("sync")) d.fail("only shfl.sync is known");
    const std::string mode = d.require_one({"up", "down", "bfly", "idx"});
    d.type();
    d.expect_operands(5, 5);
    d.op.a = d.source(1, 4), d.op.b = d.source(2, 4), d.op.c = d.source(3, 4);
    d.push_source(d.operand(4), 4);
    d.op.d = d.dest(size_t{0}, 4);
    if (!d.operand(0).second.empty()) d.op.pq = d.predicate(d.operand(0).second);
    d.op.fn = mode == "up"     ? &shuffle<kUp>
              : mode == "down" ? &shuffle<kDown>
              : mode == "bfly" ? &shuffle<kBfly>
                               : &shuffle<kIdx>;
}

enum VoteMode { kAll, kAny, kUni, kBallot };

template <VoteMode kMode>
Status vote(Warp& w, const Op& op, uint32_t mask) {  // 9.7.13.9
    const uint32_t members = w.at<uint32_t>(op.c)[__builtin_ctz(mask)];
    if (!is_converged(w, op, mask, members)) return Status::kConverge;
    const uint32_t p = w.predicate(op.ps, op.ps_negated) & mask;
    if (kMode == kBallot) {
        uint32_t r[kLanes];
        for (auto& v : r) v = p;
        store_lanes(w.at<uint32_t>(op.d), r, mask);
        return Status::kNext;
    }
    const bool v = kMode == kAll ? p == mask : kMode == kAny ? p != 0 : p == mask || p == 0;
    w.set_predicate(op.pd, v ? kAllLanes : 0, mask);
    return Status::kNext;
}

void decode_vote(Decoder& d) {
    if (!d.take("sync")) d.fail("only vote.sync is known");
    const std::string mode = d.require_one({"all", "any", "uni", "ballot"});
    d.type();
    d.predicate_source(1);
    d.op.c = d.source(2, 4);
    if (mode == "ballot")
        d.op.d = d.dest(size_t{0}, 4);
    else
        d.predicate_dest(0);
    d.op.fn = mode == "all" ? &vote<kAll> : mode == "any" ? &vote<kAny> : mode == "uni" ? &vote<kUni> : &vote<kBallot>;
}

template <class T, bool kNeedAll>
Status match(Warp& w, const Op& op, uint32_t mask) {  // 9.7.13.10
    const uint32_t members = w.at<uint32_t>(op.c)[__builtin_ctz(mask)];
    if (!is_converged(w, op, mask, members)) return Status::kConverge;
    const T* a = w.at<T>(op.a);
    uint32_t r[kLanes] = {}, all = 0;
    for (int i = 0; i < kLanes; ++i) {
        for (int k = 0; k < kLanes; ++k)
            if ((mask >> k & 1) && a[k] == a[i]) r[i] |= 1u << k;
        if (kNeedAll) {
            if (r[i] == mask)
                all |= 1u << i;
            else
                r[i] = 0;
        }
    }
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    if (kNeedAll) w.set_predicate(op.pq, all, mask);
    return Status::kNext;
}
void decode_match(Decoder& d) {
    const bool all = d.require_one({"any", "all"}) == "all";
    d.take("sync");
    const int bytes = static_cast<int>(type_size(d.type()));
    d.op.a = d.source(1, bytes), d.op.c = d.source(2, 4);
    d.op.d = d.dest(size_t{0}, 4);
    if (!d.operand(0).second.empty()) d.op.pq = d.predicate(d.operand(0).second);
    if (bytes == 8)
        d.op.fn = all ? &match<uint64_t, true> : &match<uint64_t, false>;
    else
        d.op.fn = all ? &match<uint32_t, true> : &match<uint32_t, false>;
}

template <class T, class F>
Status reduce(Warp& w, const Op& op, uint32_t mask) {  // 9.7.13.11
    const uint32_t members = w.at<uint32_t>(op.c)[__builtin_ctz(mask)];
    if (!is_converged(w, op, mask, members)) return Status::kConverge;
    const T* a = w.at<T>(op.a);
    const int first = __builtin_ctz(mask);
    T value = a[first];
    for (int i = first + 1; i < kLanes; ++i)
        if (mask >> i & 1) value = F{}(value, a[i]);
    uint32_t r[kLanes];
    for (auto& v : r) v = static_cast<uint32_t>(value);
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}
template <class T>
Handler pick_reduce(const std::string& kind) {
    using U = uint32_t;
    if (kind == "add") return &reduce<T, decltype([](T a, T b) { return static_cast<T>(U(a) + U(b)); })>;
    if (kind == "min") return &reduce<T, decltype([](T a, T b) { return std::min(a, b); })>;
    if (kind == "max") return &reduce<T, decltype([](T a, T b) { return std::max(a, b); })>;
    if (kind == "and") return &reduce<T, decltype([](T a, T b) { return a & b; })>;
    if (kind == "or") return &reduce<T, decltype([](T a, T b) { return a | b; })>;
    return &reduce<T, decltype([](T a, T b) { return a ^ b; })>;
}
void decode_redux(Decoder& d) {
    d.take("sync");
    const std::string kind = d.require_one({"add", "min", "max", "and", "or", "xor"});
    const std::string t = d.type();
    if (t[0] == 'f') d.fail("floating point needs sm_100a");
    d.op.a = d.source(1, 4), d.op.c = d.source(2, 4);
    d.op.d = d.dest(size_t{0}, 4);
    d.op.fn = t == "s32" ? pick_reduce<int32_t>(kind) : pick_reduce<uint32_t>(kind);
}

Status active_mask(Warp& w, const Op& op, uint32_t mask) {
    uint32_t r[kLanes];
    for (auto& v : r) v = mask;
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}
void decode_activemask(Decoder& d) {
    d.type();
    d.op.d = d.dest(size_t{0}, 4);
    d.op.fn = &active_mask;
}

Status elect(Warp& w, const Op& op, uint32_t mask) {  // 9.7.13.12: some one lane; here the lowest
    const uint32_t members = w.at<uint32_t>(op.c)[__builtin_ctz(mask)];
    if (!is_converged(w, op, mask, members)) return Status::kConverge;
    const int leader = __builtin_ctz(mask);
    if (op.d != kNoRef) {
        uint32_t r[kLanes];
        for (auto& v : r) v = leader;
        store_lanes(w.at<uint32_t>(op.d), r, mask);
    }
    w.set_predicate(op.pq, 1u << leader, mask);
    return Status::kNext;
}
void decode_elect(Decoder& d) {
    d.take("sync");
    d.op.c = d.source(1, 4);
    if (d.operand(0).kind != Operand::kSink) d.op.d = d.dest(size_t{0}, 4);
    d.op.pq = d.predicate(d.operand(0).second);
    d.op.fn = &elect;
}

Status warp_barrier(Warp& w, const Op& op, uint32_t mask) {
    const uint32_t members = w.at<uint32_t>(op.a)[__builtin_ctz(mask)];
    if (is_converged(w, op, mask, members)) return Status::kNext;
    return Status::kWarpBarrier;
}
void decode_warp_barrier(Decoder& d) {
    d.take("sync");
    d.op.a = d.source(size_t{0}, 4);
    d.op.fn = &warp_barrier;
}

}  // namespace

const InstructionTable kWarpInstructions = {
    {"shfl", "9.7.9.6", "exchange of registers between lanes (.sync)", decode_shfl},
    {"vote", "9.7.13.9", "all, any, uni, ballot (.sync)", decode_vote},
    {"match", "9.7.13.10", "lanes that hold the same value", decode_match},
    {"redux", "9.7.13.11", "integer reduction over lanes", decode_redux},
    {"activemask", "9.7.13.8", "lanes that execute together", decode_activemask},
    {"elect", "9.7.13.12", "picks one lane (the lowest)", decode_elect},
    {"bar.warp", "9.7.13.2", "waits for the member lanes, wherever their bar.warp.sync stands", decode_warp_barrier},
};

}  // namespace moksim
