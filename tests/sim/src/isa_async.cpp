// Asynchronous copies: cp.async, bulk copies and tensor copies (PTX ISA 9.7.9.25 to 9.7.9.28).
//
// Each copy becomes a task that the scheduler runs at some later time, or at the latest when something that its
// completion mechanism orders is waited for. What the copy reads is read then, not at its issue.
#include <cmath>

#include "isa.h"
#include "sync.h"
#include "tensor_map.h"

namespace moksim {
namespace {

struct AsyncAddress {
    uint64_t lane(const Warp& w, int lane) const {
        const uint64_t b = base == kNoRef ? 0 : is_wide ? w.at<uint64_t>(base)[lane] : w.at<uint32_t>(base)[lane];
        return b + offset;
    }
    Ref base = kNoRef;
    bool is_wide = false;
    uint64_t offset = 0;
};

// Addresses of these instructions are pushed as (base) to the further operands, their offsets and widths to a table of
// the op's own: the offsets are small, so they travel in Op::imm, 16 bits each, and the widths in Op::y.
void push_address(Decoder& d, const Operand& o) {
    const auto a = d.address(o);
    if (a.offset < 0 || a.offset >= 1 << 20) d.fail("address offset out of range");
    const auto index = static_cast<uint32_t>(d.ext.size());
    if (index >= 3) d.fail("too many addresses");
    d.ext.push_back(a.base);
    d.op.imm |= static_cast<uint64_t>(a.offset) << (20 * index);
    d.op.y |= static_cast<uint32_t>(a.is_wide) << index;
}

AsyncAddress get_address(const Warp& w, const Op& op, uint32_t index) {
    return {w.program->ext[op.ext + index], (op.y >> index & 1) != 0, op.imm >> (20 * index) & 0xfffff};
}

std::shared_ptr<const Order> snapshot(Warp& w) {
    auto order = std::make_shared<const Order>(w.order);
    w.raise_clock();
    return order;
}

// cp.async (LDGSTS, generic proxy)

void run_cp(CpAsyncOp& op) {
    if (!op.run) return;
    auto run = std::move(op.run);
    op.run = nullptr;
    run();
}

void finish_cp(Warp& w, uint32_t sequence) {  // all up to this one
    for (auto& op : w.cp_ops)
        if (op.sequence <= sequence) run_cp(op);
}

Status cp_async(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    const uint32_t bytes = op.x;
    const Ref size_ref = op.a;
    struct Lane {
        Place to, from;
        uint32_t read;
    };
    auto lanes = std::make_shared<std::vector<Lane>>();
    CpAsyncOp pending;
    for (int lane = 0; lane < kLanes; ++lane) {
        pending.group[lane] = w.cp_group[lane];
        if (!(mask >> lane & 1)) continue;
        uint32_t read = size_ref == kNoRef ? bytes : w.at<uint32_t>(size_ref)[lane];
        if (op.ps && (w.predicate(op.ps, op.ps_negated) >> lane & 1)) read = 0;
        if (read > bytes) m.fatal("bounds", format("cp.async: src-size %u of %u", read, bytes), &w, &op);
        Lane l;
        l.to = resolve(w, op, kSharedSpace, get_address(w, op, 0).lane(w, lane), bytes, bytes, true);
        if (read) l.from = resolve(w, op, kGlobalSpace, get_address(w, op, 1).lane(w, lane), read, bytes, false);
        l.read = read;
        lanes->push_back(l);
    }
    pending.mask = mask;
    pending.sequence = ++w.cp_sequence;
    auto order = snapshot(w);
    Cta* cta = w.cta;
    ++cta->async_in_flight;
    const Actor actor{w.cp_entity, pending.sequence, order.get(), op.id};
    pending.run = [&m, lanes, order, actor, bytes, cta] {
        for (auto& l : *lanes) {
            if (l.read && l.from.region) check_access(m, *l.from.region, l.from.offset, l.read, kRead, actor);
            check_access(m, *l.to.region, l.to.offset, bytes, kWrite, actor);
            memset(l.to.host, 0, bytes);
            if (l.read) memcpy(l.to.host, l.from.host, l.read);
        }
        --cta->async_in_flight;
        m.progress();
    };
    w.cp_ops.push_back(std::move(pending));
    m.add_async(*cta, [warp = &w, sequence = w.cp_sequence] {
        for (auto& p : warp->cp_ops)
            if (p.sequence == sequence) run_cp(p);
    });
    return Status::kNext;
}

void decode_cp_async(Decoder& d) {
    d.require_one({"ca", "cg"});
    d.take_one({"shared", "shared::cta"});
    d.take("global");
    const bool has_hint = d.take("L2::cache_hint");
    d.take_one({"L2::64B", "L2::128B", "L2::256B"});
    push_address(d, d.operand(0));
    push_address(d, d.operand(1));
    d.op.x = static_cast<uint32_t>(d.immediate(2));
    if (d.op.x != 4 && d.op.x != 8 && d.op.x != 16) d.fail("size must be 4, 8 or 16");
    size_t i = 3;
    if (i < d.size() - has_hint && d.is_predicate(i))
        d.predicate_source(i++);
    else if (i < d.size() - has_hint)
        d.op.a = d.source(i++, 4);
    d.op.fn = &cp_async;
}

Status cp_commit(Warp& w, const Op&, uint32_t mask) {
    for (int lane = 0; lane < kLanes; ++lane) w.cp_group[lane] += mask >> lane & 1;
    return Status::kNext;
}

// Op::imm: groups that may stay; Op::x: even the uncommitted ones are waited for (wait_all).
Status cp_wait(Warp& w, const Op& op, uint32_t mask) {
    for (auto it = w.cp_ops.begin(); it != w.cp_ops.end();) {
        bool is_waited = true;
        for (int lane = 0; lane < kLanes; ++lane)
            if (it->mask >> lane & 1)
                is_waited &= (mask >> lane & 1) && (op.x || it->group[lane] + op.imm < w.cp_group[lane]);
        if (is_waited) {
            run_cp(*it);
            it = w.cp_ops.erase(it);
        } else {
            ++it;
        }
    }
    w.order.seen.raise(w.cp_entity, w.cp_ops.empty() ? w.cp_sequence : w.cp_ops.front().sequence - 1);
    return Status::kNext;
}

Status cp_mbarrier_arrive(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    const uint32_t sequence = w.cp_sequence;
    struct Arrival {
        Cta* cta;
        uint32_t offset;
    };
    std::vector<Arrival> arrivals;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Cta* owner;
        Mbarrier& b = find_mbarrier(w, op, static_cast<uint32_t>(get_address(w, op, 0).lane(w, lane)), &owner);
        if (!op.x) ++b.pending;
        arrivals.push_back({owner, b.offset});
    }
    ++w.cta->async_in_flight;
    m.add_async(*w.cta, [&m, warp = &w, sequence, arrivals, id = op.id] {
        finish_cp(*warp, sequence);
        std::erase_if(warp->cp_ops, [&](CpAsyncOp& p) { return p.sequence <= sequence; });
        --warp->cta->async_in_flight;
        Order order;  // covers the copies, not what else the thread did
        order.seen.raise(warp->cp_entity, sequence);
        for (auto& a : arrivals) {
            auto found = a.cta->mbarriers.find(a.offset);
            if (found == a.cta->mbarriers.end())
                m.fatal("barrier", "mbarrier gone before its cp.async arrived", warp, nullptr);
            mbarrier_update(m, *a.cta, found->second, 1, 0, &order, id);
        }
    });
    return Status::kNext;
}

// Bulk copies

void run_write(const std::shared_ptr<BulkOp>& op) {
    if (op->has_written) return;
    op->has_written = true;
    op->write();
}
void run_read(Machine& m, Launch* launch, const std::shared_ptr<BulkOp>& op) {
    if (op->has_read) return;
    op->has_read = true;
    op->read();
    m.add_async(launch, [op] { run_write(op); });
}

struct Segment {  // contiguous bytes of a copy in global memory, and where they lie in the linear tile
    Place global;
    uint32_t tile_offset, bytes;
};

// Copies `segments` between a tile at `offset` of the CTA's shared memory and global memory.
struct TileCopy {
    std::vector<Segment> segments;
    uint32_t tile_bytes = 0;
    int swizzle = 0;
    uint32_t fill_word = 0;  // what is not in a segment reads as this
};

void copy_to_shared(Machine& m, const TileCopy& c, Cta& cta, uint32_t offset, const Actor& actor) {
    check_access(m, cta.shared_region, offset, c.tile_bytes, kWrite | kAsync, actor);
    std::vector<uint8_t> tile(c.tile_bytes);
    for (uint32_t i = 0; i + 4 <= c.tile_bytes; i += 4) memcpy(&tile[i], &c.fill_word, 4);
    for (auto& s : c.segments) {
        memcpy(&tile[s.tile_offset], s.global.host, s.bytes);
        if (!s.global.region) continue;
        check_access(m, *s.global.region, s.global.offset, s.bytes, kRead | kAsync | kAnyContent, actor);
        for (uint32_t i = 0; i < s.bytes;) {  // in pieces that the swizzle leaves together
            const uint32_t at = s.tile_offset + i, piece = std::min(16 - at % 16, s.bytes - i);
            copy_initialized(*s.global.region, s.global.offset + i, cta.shared_region,
                             swizzle_address(offset + at, c.swizzle), piece);
            i += piece;
        }
    }
    for (uint32_t i = 0; i < c.tile_bytes; i += 16)
        memcpy(&cta.shared[swizzle_address(offset + i, c.swizzle)], &tile[i], std::min(16u, c.tile_bytes - i));
}

std::vector<uint8_t> read_tile(Machine& m, const TileCopy& c, Cta& cta, uint32_t offset, const Actor& actor) {
    std::vector<uint8_t> tile(c.tile_bytes);
    for (uint32_t i = 0; i < c.tile_bytes; i += 16)
        memcpy(&tile[i], &cta.shared[swizzle_address(offset + i, c.swizzle)], std::min(16u, c.tile_bytes - i));
    // Only what is written to global memory counts as read.
    for (auto& s : c.segments) {
        if (!c.swizzle) {
            check_access(m, cta.shared_region, offset + s.tile_offset, s.bytes, kRead | kAsync, actor);
            continue;
        }
        for (uint32_t i = s.tile_offset / 16 * 16; i < s.tile_offset + s.bytes; i += 16)
            check_access(m, cta.shared_region, swizzle_address(offset + i, c.swizzle), 16, kRead | kAsync, actor);
    }
    return tile;
}

enum ReduceKind { kNone, kAdd, kMin, kMax, kAnd, kOr, kXor, kInc, kDec };
enum ElementType { kU32, kS32, kU64, kS64, kHalf, kBfloat, kF32, kF64 };

template <class T>
void reduce_elements(uint8_t* to, const uint8_t* from, size_t bytes, ReduceKind kind) {
    for (size_t i = 0; i < bytes; i += sizeof(T)) {
        T a, b, r{};
        memcpy(&a, to + i, sizeof(T)), memcpy(&b, from + i, sizeof(T));
        if constexpr (std::is_same_v<T, Bfloat> || std::is_same_v<T, Half>) {
            const float x = to_float(a), y = to_float(b);
            const float z = kind == kAdd ? x + y : kind == kMin ? std::fmin(x, y) : std::fmax(x, y);
            if constexpr (std::is_same_v<T, Bfloat>)
                r = to_bfloat(z);
            else
                r = to_half(z);
        } else {
            if (kind == kAdd) r = a + b;
            if (kind == kMin) r = std::min(a, b);
            if (kind == kMax) r = std::max(a, b);
            if constexpr (std::is_integral_v<T>) {
                if (kind == kAdd)
                    r = static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) +
                                       static_cast<std::make_unsigned_t<T>>(b));
                if (kind == kAnd) r = a & b;
                if (kind == kOr) r = a | b;
                if (kind == kXor) r = a ^ b;
                if (kind == kInc) r = a >= b ? 0 : a + 1;
                if (kind == kDec) r = a == 0 || a > b ? b : a - 1;
            }
        }
        memcpy(to + i, &r, sizeof(T));
    }
}

void write_bytes(uint8_t* to, const uint8_t* from, size_t bytes, ReduceKind kind, ElementType type) {
    if (kind == kNone) return void(memcpy(to, from, bytes));
    switch (type) {
        case kU32:
            return reduce_elements<uint32_t>(to, from, bytes, kind);
        case kS32:
            return reduce_elements<int32_t>(to, from, bytes, kind);
        case kU64:
            return reduce_elements<uint64_t>(to, from, bytes, kind);
        case kS64:
            return reduce_elements<int64_t>(to, from, bytes, kind);
        case kHalf:
            return reduce_elements<Half>(to, from, bytes, kind);
        case kBfloat:
            return reduce_elements<Bfloat>(to, from, bytes, kind);
        case kF32:
            return reduce_elements<float>(to, from, bytes, kind);
        case kF64:
            return reduce_elements<double>(to, from, bytes, kind);
    }
}

// The mbarrier that a copy completes on must be known to the async proxy.
void check_mbarrier_fence(Machine& m, Warp& w, const Op& op, const Mbarrier& b) {
    if (b.is_fenced || w.order.fenced[b.init_entity] >= b.init_clock || !(m.config.checks & kCheckProxy)) return;
    m.report("proxy",
             format("mbarrier shared+%u: no fence.mbarrier_init or fence.proxy.async between its init and the "
                    "copy that completes on it\n  at %s\n  by %s",
                    b.offset, m.source(op.id).c_str(), name_of(w).c_str()),
             op.id);
}

Place resolve_tile(Warp& w, const Op& op, uint64_t address, uint32_t bytes, uint32_t align) {
    return resolve(w, op, kSharedSpace, static_cast<uint32_t>(address), bytes, align, true);
}

// Into shared memory of one CTA, completing on an mbarrier of the same CTA.
void issue_load(Warp& w, const Op& op, TileCopy copy, uint32_t destination, uint32_t mbarrier, uint32_t align,
                std::shared_ptr<const Order> order) {
    Machine& m = Machine::get();
    const Place to = resolve_tile(w, op, destination, copy.tile_bytes, align);
    Cta* owner;
    Mbarrier& b = find_mbarrier(w, op, mbarrier, &owner);
    if (owner != to.cta) m.fatal("barrier", "the mbarrier is not in the CTA that receives the copy", &w, &op);
    check_mbarrier_fence(m, w, op, b);
    ++owner->async_in_flight;
    m.add_async(*owner, [&m, copy = std::move(copy), order, owner, offset = static_cast<uint32_t>(to.offset),
                         barrier = b.offset, id = op.id] {
        --owner->async_in_flight;
        auto found = owner->mbarriers.find(barrier);
        if (found == owner->mbarriers.end())
            m.fatal("barrier", "mbarrier gone before its copy completed", nullptr, nullptr);
        Mbarrier& mb = found->second;
        copy_to_shared(m, copy, *owner, offset, {mb.entity, mb.clock_base + mb.phase + 1, order.get(), id});
        mbarrier_update(m, *owner, mb, 0, -static_cast<int64_t>(copy.tile_bytes), nullptr, id);
    });
}

void issue_multicast(Warp& w, const Op& op, const TileCopy& copy, uint32_t destination, uint32_t mbarrier,
                     uint32_t align, uint32_t cta_mask) {
    Machine& m = Machine::get();
    auto order = snapshot(w);
    if (cta_mask == 0 || cta_mask >> w.cta->cluster->ctas.size())
        m.fatal("bounds", format("multicast mask 0x%x in a cluster of %zu", cta_mask, w.cta->cluster->ctas.size()), &w,
                &op);
    for (uint32_t rank = 0; rank < w.cta->cluster->ctas.size(); ++rank)
        if (cta_mask >> rank & 1)
            issue_load(w, op, copy, (destination & kSharedOffsetMask) | rank << kSharedRankShift,
                       (mbarrier & kSharedOffsetMask) | rank << kSharedRankShift, align, order);
}

void issue_store(Warp& w, const Op& op, TileCopy copy, uint32_t source, uint32_t align, int lane, ReduceKind kind,
                 ElementType type) {
    Machine& m = Machine::get();
    const Place from = resolve_tile(w, op, source, copy.tile_bytes, align);
    if (from.cta != w.cta) m.fatal("bounds", "bulk store from another CTA's shared memory", &w, &op);
    auto bulk = std::make_shared<BulkOp>();
    bulk->sequence = ++w.bulk_sequence;
    bulk->group = w.bulk_group[lane];
    bulk->lane = lane;
    auto order = snapshot(w);
    auto tile = std::make_shared<std::vector<uint8_t>>();
    auto shared_copy = std::make_shared<const TileCopy>(std::move(copy));
    Cta* cta = w.cta;
    ++cta->async_in_flight;
    const Actor reader{w.bulk_read_entity, bulk->sequence, order.get(), op.id};
    const Actor writer{w.bulk_write_entity, bulk->sequence, order.get(), op.id};
    bulk->read = [&m, shared_copy, order, tile, cta, offset = static_cast<uint32_t>(from.offset), reader] {
        *tile = read_tile(m, *shared_copy, *cta, offset, reader);
        --cta->async_in_flight;
        m.progress();
    };
    bulk->write = [&m, shared_copy, order, tile, writer, kind, type] {
        const uint8_t access = kWrite | kAsync | (kind == kNone ? 0 : kStrong);
        for (auto& s : shared_copy->segments) {
            if (s.global.region) check_access(m, *s.global.region, s.global.offset, s.bytes, access, writer);
            write_bytes(s.global.host, tile->data() + s.tile_offset, s.bytes, kind, type);
        }
        m.progress();
    };
    w.bulk_ops.push_back(bulk);
    m.add_async(cta->launch, [&m, bulk, launch = cta->launch] { run_read(m, launch, bulk); });
}

Status bulk_commit(Warp& w, const Op&, uint32_t mask) {
    for (int lane = 0; lane < kLanes; ++lane) w.bulk_group[lane] += mask >> lane & 1;
    return Status::kNext;
}

// Op::x: only the reads (.read). Op::imm: groups that may stay.
Status bulk_wait(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    for (auto& bulk : w.bulk_ops) {
        if (!(mask >> bulk->lane & 1) || bulk->group + op.imm >= w.bulk_group[bulk->lane]) continue;
        run_read(m, w.cta->launch, bulk);
        bulk->is_read_waited = true;
        w.order.seen.raise(w.bulk_read_entity, bulk->sequence);
        if (op.x) continue;
        run_write(bulk);
        w.order.seen.raise(w.bulk_write_entity, bulk->sequence);
    }
    std::erase_if(w.bulk_ops, [](auto& bulk) { return bulk->is_read_waited && bulk->has_written; });
    return Status::kNext;
}

// cp.async.bulk without a tensor map. Op::x bits: see the constants.
enum BulkFlags { kToShared = 1, kFromShared = 2, kMulticast = 4, kPrefetch = 8 };

Status bulk_copy(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    const auto kind = static_cast<ReduceKind>(op.x >> 8 & 15);
    const auto type = static_cast<ElementType>(op.x >> 12 & 15);
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const uint64_t first = get_address(w, op, 0).lane(w, lane);
        const uint32_t bytes = w.at<uint32_t>(op.a)[lane];
        if (bytes % 16) m.fatal("align", format("bulk copy of %u bytes: not a multiple of 16", bytes), &w, &op);
        if (bytes == 0) m.fatal("bounds", "bulk copy of zero bytes", &w, &op);
        if (op.x & kPrefetch) {
            resolve(w, op, kGlobalSpace, first, bytes, 16, false);
            continue;
        }
        const uint64_t second = get_address(w, op, 1).lane(w, lane);
        TileCopy copy;
        copy.tile_bytes = bytes;
        if (!(op.x & kToShared)) {
            copy.segments = {{resolve(w, op, kGlobalSpace, first, bytes, 16, true), 0, bytes}};
            issue_store(w, op, std::move(copy), static_cast<uint32_t>(second), 16, lane, kind, type);
            continue;
        }
        if (op.x & kFromShared) {
            if (kind != kNone) m.fatal("error", "reductions into shared memory are not supported", &w, &op);
            copy.segments = {{resolve(w, op, kSharedSpace, static_cast<uint32_t>(second), bytes, 16, false), 0, bytes}};
        } else {
            copy.segments = {{resolve(w, op, kGlobalSpace, second, bytes, 16, false), 0, bytes}};
        }
        const auto mbarrier = static_cast<uint32_t>(get_address(w, op, 2).lane(w, lane));
        if (op.x & kMulticast)
            issue_multicast(w, op, copy, static_cast<uint32_t>(first), mbarrier, 16,
                            w.at<uint32_t>(op.b)[lane] & 0xffff);
        else
            issue_load(w, op, copy, static_cast<uint32_t>(first), mbarrier, 16, snapshot(w));
    }
    return Status::kNext;
}

uint32_t take_reduction(Decoder& d) {
    static const std::pair<const char*, ReduceKind> kinds[] = {{"add", kAdd}, {"min", kMin}, {"max", kMax},
                                                               {"and", kAnd}, {"or", kOr},   {"xor", kXor},
                                                               {"inc", kInc}, {"dec", kDec}};
    for (auto& [name, kind] : kinds)
        if (d.take(name)) return static_cast<uint32_t>(kind);
    d.fail("unknown reduction");
}

uint32_t take_element_type(Decoder& d) {
    static const std::pair<const char*, ElementType> types[] = {
        {"u32", kU32}, {"b32", kU32},  {"s32", kS32},     {"u64", kU64}, {"b64", kU64},
        {"s64", kS64}, {"f16", kHalf}, {"bf16", kBfloat}, {"f32", kF32}, {"f64", kF64}};
    d.take("noftz");
    for (auto& [name, type] : types)
        if (d.take(name)) return static_cast<uint32_t>(type);
    d.fail("unknown element type");
}

// Destination and source spaces come in this order in the opcode, so they are taken by position.
std::pair<std::string, std::string> take_spaces(Decoder& d) {
    std::vector<std::string> found;
    for (auto it = d.modifiers.begin(); it != d.modifiers.end() && found.size() < 2;) {
        if (*it == "global" || *it == "shared::cta" || *it == "shared::cluster") {
            found.push_back(*it);
            it = d.modifiers.erase(it);
        } else {
            ++it;
        }
    }
    found.resize(2);
    return {found[0], found[1]};
}

template <bool kReduces>
void decode_bulk(Decoder& d) {
    const auto [to, from] = take_spaces(d);
    const bool has_hint = d.take("L2::cache_hint");
    if (d.take("multicast::cluster")) d.op.x |= kMulticast;
    if (to != "global") d.op.x |= kToShared;
    if (from != "global") d.op.x |= kFromShared;
    if (kReduces) {
        d.op.x |= take_reduction(d) << 8;
        d.op.x |= take_element_type(d) << 12;
    }
    push_address(d, d.operand(0));
    push_address(d, d.operand(1));
    d.op.a = d.source(2, 4);
    size_t i = 3;
    if (to == "global") {
        if (!d.take("bulk_group")) d.fail("expected .bulk_group");
    } else {
        if (!d.take("mbarrier::complete_tx::bytes")) d.fail("expected .mbarrier::complete_tx::bytes");
        push_address(d, d.operand(i++));
        if (d.op.x & kMulticast) d.op.b = d.source(i++, 4);
    }
    d.expect_operands(i + has_hint, i + has_hint);
    d.op.fn = &bulk_copy;
}

void decode_bulk_prefetch(Decoder& d) {
    d.take("L2"), d.take("global"), d.take("L2::cache_hint");
    push_address(d, d.operand(0));
    d.op.a = d.source(1, 4);
    d.op.x = kPrefetch;
    d.op.fn = &bulk_copy;
}

// Tensor copies in tile mode

const TensorMap& tensor_map(Warp& w, const Op& op, uint64_t address) {
    const Place p = resolve(w, op, kGenericSpace, address, 128, 64, false);
    const auto& map = *reinterpret_cast<const TensorMap*>(p.host);
    if (map.magic != TensorMap::kMagic) Machine::get().fatal("bounds", "not a tensor map", &w, &op);
    return map;
}

// The rows of a box, clipped to the tensor: what lies outside reads as the fill value and is not written (5.5.3).
TileCopy tile_of(Warp& w, const Op& op, const TensorMap& map, const int32_t* coordinates, bool writes) {
    TileCopy copy;
    copy.swizzle = map.swizzle;
    const uint32_t row_bytes = map.box[0] * map.element_bytes;
    uint32_t rows = 1;
    for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
    copy.tile_bytes = rows * row_bytes;
    if (map.fills_nan) copy.fill_word = map.element_bytes == 4 ? 0x7fffffff : 0x7fff7fff;
    const int64_t first = std::max<int64_t>(coordinates[0], 0);
    const int64_t last = std::min<int64_t>(int64_t{coordinates[0]} + map.box[0], map.dims[0]);
    if (first >= last) return copy;
    for (uint32_t row = 0; row < rows; ++row) {
        uint64_t offset = first * map.element_bytes;
        bool is_inside = true;
        uint32_t rest = row;
        for (int i = 1; i < map.rank; ++i) {
            const int64_t c = int64_t{coordinates[i]} + rest % map.box[i];
            rest /= map.box[i];
            is_inside &= c >= 0 && c < map.dims[i];
            offset += static_cast<uint64_t>(c) * map.strides[i - 1];
        }
        if (!is_inside) continue;
        const auto bytes = static_cast<uint32_t>((last - first) * map.element_bytes);
        const auto skip = static_cast<uint32_t>((first - coordinates[0]) * map.element_bytes);
        copy.segments.push_back(
            {resolve(w, op, kGlobalSpace, map.base + offset, bytes, 1, writes), row * row_bytes + skip, bytes});
    }
    return copy;
}

// Further operands: the map's address, the shared address and (loads) the mbarrier, then the coordinates.
Status tensor_copy(Warp& w, const Op& op, uint32_t mask) {
    const uint32_t num_addresses = op.x & kToShared ? 3 : op.x & kPrefetch ? 1 : 2;
    const uint32_t rank = op.num_ext - num_addresses;
    const auto kind = static_cast<ReduceKind>(op.x >> 8 & 15);
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const TensorMap& map = tensor_map(w, op, get_address(w, op, 0).lane(w, lane));
        if (map.rank != rank)
            Machine::get().fatal("bounds", format("a %u-dimensional copy with a map of %d dimensions", rank, map.rank),
                                 &w, &op);
        int32_t coordinates[5] = {};
        for (uint32_t i = 0; i < rank; ++i)
            coordinates[i] = w.at<int32_t>(w.program->ext[op.ext + num_addresses + i])[lane];
        // Neither is in the PTX ISA; an H200 ends the kernel with an illegal instruction.
        const bool stores = !(op.x & (kToShared | kPrefetch));
        if (coordinates[0] * map.element_bytes % 16)
            Machine::get().fatal(
                "align", format("innermost coordinate %d of a tile: not a multiple of 16 bytes", coordinates[0]), &w,
                &op);
        if (stores && std::any_of(coordinates, coordinates + rank, [](int32_t c) { return c < 0; }))
            Machine::get().fatal("bounds", "tensor store at a negative coordinate", &w, &op);
        TileCopy copy = tile_of(w, op, map, coordinates, stores);
        if (op.x & kPrefetch) continue;
        const auto shared = static_cast<uint32_t>(get_address(w, op, 1).lane(w, lane));
        if (stores) {
            const ElementType type = map.element_bytes == 8   ? (map.is_float ? kF64 : kU64)
                                     : map.element_bytes == 4 ? (map.is_float    ? kF32
                                                                 : map.is_signed ? kS32
                                                                                 : kU32)
                                                              : (map.is_bf16 ? kBfloat : kHalf);
            issue_store(w, op, std::move(copy), shared, 128, lane, kind, type);
            continue;
        }
        const auto mbarrier = static_cast<uint32_t>(get_address(w, op, 2).lane(w, lane));
        if (op.x & kMulticast)
            issue_multicast(w, op, copy, shared, mbarrier, 128, w.at<uint32_t>(op.b)[lane] & 0xffff);
        else
            issue_load(w, op, copy, shared, mbarrier, 128, snapshot(w));
    }
    return Status::kNext;
}

void push_map(Decoder& d, const Operand& o) {
    if (o.elements.size() != 1) d.fail("expected [map, {coordinates}]");
    Operand base = o;
    base.elements.clear();
    push_address(d, base);
}

template <bool kReduces, bool kIsPrefetch>
void decode_tensor(Decoder& d) {
    d.take_one({"1d", "2d", "3d", "4d", "5d"});
    d.take("tile");
    const bool has_hint = d.take("L2::cache_hint");
    if (kIsPrefetch) {
        d.take("L2"), d.take("global");
        push_map(d, d.operand(0));
        d.op.x = kPrefetch;
        d.push_source(d.operand(0).elements[0], 4);
        d.op.fn = &tensor_copy;
        return;
    }
    const auto [to, from] = take_spaces(d);
    if (d.take("multicast::cluster")) d.op.x |= kMulticast;
    if (kReduces) d.op.x |= take_reduction(d) << 8;
    size_t i = 2;
    if (to == "global") {
        if (!d.take("bulk_group")) d.fail("expected .bulk_group");
        push_map(d, d.operand(0));
        push_address(d, d.operand(1));
        d.push_source(d.operand(0).elements[0], 4);
    } else {
        if (!d.take("mbarrier::complete_tx::bytes")) d.fail("expected .mbarrier::complete_tx::bytes");
        d.op.x |= kToShared;
        push_map(d, d.operand(1));
        push_address(d, d.operand(0));
        push_address(d, d.operand(i++));
        d.push_source(d.operand(1).elements[0], 4);
        if (d.op.x & kMulticast) d.op.b = d.source(i++, 4);
    }
    d.expect_operands(i + has_hint, i + has_hint);
    d.op.fn = &tensor_copy;
}

// st.async: values into another CTA's shared memory, completing on an mbarrier there. Further operands: the
// destination's and the mbarrier's address, then the values. Op::x: bytes of one value.
Status store_async(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    const uint32_t count = op.num_ext - 2, bytes = op.x * count;
    auto order = snapshot(w);
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        std::vector<uint8_t> value(bytes);
        for (uint32_t i = 0; i < count; ++i) {
            const Ref from = w.program->ext[op.ext + 2 + i];
            memcpy(&value[i * op.x],
                   op.x == 8 ? static_cast<void*>(&w.at<uint64_t>(from)[lane]) : &w.at<uint32_t>(from)[lane], op.x);
        }
        const Place to = resolve(w, op, kSharedSpace, get_address(w, op, 0).lane(w, lane), bytes, bytes, true);
        Cta* owner;
        Mbarrier& b = find_mbarrier(w, op, static_cast<uint32_t>(get_address(w, op, 1).lane(w, lane)), &owner);
        if (owner != to.cta) m.fatal("barrier", "the mbarrier is not in the CTA that receives the store", &w, &op);
        ++owner->async_in_flight;
        m.add_async(*owner, [&m, owner, to, value, order, barrier = b.offset, id = op.id] {
            --owner->async_in_flight;
            Mbarrier& mb = owner->mbarriers.at(barrier);
            check_access(m, *to.region, to.offset, value.size(), kWrite,
                         {mb.entity, mb.clock_base + mb.phase + 1, order.get(), id});
            memcpy(to.host, value.data(), value.size());
            mbarrier_update(m, *owner, mb, 0, -static_cast<int64_t>(value.size()), nullptr, id);
        });
    }
    return Status::kNext;
}

void decode_store_async(Decoder& d) {
    d.take("weak"), d.take("shared::cluster");
    if (!d.take("mbarrier::complete_tx::bytes")) d.fail("expected .mbarrier::complete_tx::bytes");
    d.take_one({"v2", "v4"});
    d.op.x = static_cast<uint32_t>(type_size(d.type()));
    push_address(d, d.operand(0));
    push_address(d, d.operand(2));
    d.push_source(d.operand(1), static_cast<int>(d.op.x));
    d.op.fn = &store_async;
}

}  // namespace

const InstructionTable kAsyncInstructions = {
    {"cp.async", "9.7.9.25.3.1", "4, 8 or 16 bytes a thread, zero fill behind src-size; generic proxy",
     decode_cp_async},
    {"cp.async.commit_group", "9.7.9.25.3.2", "closes a group", [](Decoder& d) { d.op.fn = &cp_commit; }},
    {"cp.async.wait_group", "9.7.9.25.3.3", "waits for all but the last n groups",
     [](Decoder& d) {
         d.op.imm = d.immediate(0);
         d.op.fn = &cp_wait;
     }},
    {"cp.async.wait_all", "9.7.9.25.3.3", "waits for all copies of the thread",
     [](Decoder& d) {
         d.op.x = 1;
         d.op.fn = &cp_wait;
     }},
    {"cp.async.mbarrier.arrive", "9.7.13.15.15", "arrives when the thread's earlier cp.async are done",
     [](Decoder& d) {
         d.op.x = d.take("noinc");
         d.take_one({"shared", "shared::cta"}), d.take("b64");
         push_address(d, d.operand(0));
         d.op.fn = &cp_mbarrier_arrive;
     }},
    {"cp.async.bulk", "9.7.9.25.5.2", "bytes between global and shared memory; multicast", decode_bulk<false>},
    {"cp.reduce.async.bulk", "9.7.9.25.5.3", "reduction into global memory", decode_bulk<true>},
    {"cp.async.bulk.prefetch", "9.7.9.25.5.4", "checks bounds only", decode_bulk_prefetch},
    {"cp.async.bulk.tensor", "9.7.9.27.1.2", "tiles of up to five dimensions; swizzle, fill, multicast",
     decode_tensor<false, false>},
    {"cp.reduce.async.bulk.tensor", "9.7.9.27.1.3", "reduction of a tile into global memory",
     decode_tensor<true, false>},
    {"cp.async.bulk.prefetch.tensor", "9.7.9.27.1.4", "checks bounds only", decode_tensor<false, true>},
    {"st.async", "9.7.9.12", "store into shared memory of the cluster that completes on an mbarrier",
     decode_store_async},
    {"cp.async.bulk.commit_group", "9.7.9.25.4.1", "closes a bulk group", [](Decoder& d) { d.op.fn = &bulk_commit; }},
    {"cp.async.bulk.wait_group", "9.7.9.25.4.2", "waits for all but the last n bulk groups; .read: for their reads",
     [](Decoder& d) {
         d.op.x = d.take("read");
         d.op.imm = d.immediate(0);
         d.op.fn = &bulk_wait;
     }},
};

}  // namespace moksim
