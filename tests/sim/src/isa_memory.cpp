// Loads, stores, atomics and address arithmetic (PTX ISA 9.7.9 and 9.7.13).
#include <cmath>

#include "access.h"
#include "isa.h"

namespace moksim {

Cta& cta_of(Warp& w, const Op& op, uint32_t address) {
    const uint32_t rank = address >> kSharedRankShift;
    if (rank >= w.cta->cluster->ctas.size())
        Machine::get().fatal(
            "bounds",
            format("shared address 0x%x names CTA %u of a cluster of %zu", address, rank, w.cta->cluster->ctas.size()),
            &w, &op);
    Cta& cta = *w.cta->cluster->ctas[rank];
    if (cta.has_exited)
        Machine::get().fatal("bounds", format("shared memory of CTA %u, which has exited", cta.index), &w, &op);
    return cta;
}

static Place resolve_shared(Warp& w, const Op& op, uint32_t address, uint64_t bytes) {
    Cta& cta = cta_of(w, op, address);
    const uint32_t offset = address & kSharedOffsetMask;
    if (offset < kSharedReserved || offset + bytes > cta.shared.size())
        Machine::get().fatal("bounds",
                             format("%lu bytes at shared+%u are outside of [%u, %zu)",
                                    static_cast<unsigned long>(bytes), offset, kSharedReserved, cta.shared.size()),
                             &w, &op);
    return {cta.shared.data() + offset, &cta.shared_region, offset, &cta};
}

Place resolve(Warp& w, const Op& op, Space space, Addr address, uint64_t bytes, uint64_t align, bool writes, int lane) {
    Machine& m = Machine::get();
    if (address % align && (m.config.checks & kCheckAlign))
        m.fatal("align",
                format("address 0x%lx is not a multiple of %lu", static_cast<unsigned long>(address),
                       static_cast<unsigned long>(align)),
                &w, &op);
    if (space == kGenericSpace)
        space = address >> 56 == kSharedWindow >> 56  ? kSharedSpace
                : address >> 56 == kLocalWindow >> 56 ? kLocalSpace
                                                      : kGlobalSpace;
    if (space == kSharedSpace) return resolve_shared(w, op, static_cast<uint32_t>(address), bytes);
    if (space == kLocalSpace) {
        const auto offset = static_cast<uint32_t>(address);
        if (offset + bytes > w.program->local_bytes) m.fatal("bounds", "outside of local memory", &w, &op);
        return {w.local.data() + static_cast<size_t>(lane) * w.program->local_bytes + offset};
    }
    Region* region = m.memory.find(address);
    if (region && region->contains(address, bytes)) {
        if (writes && region->is_read_only) m.fatal("bounds", "write to read-only " + region->name, &w, &op);
        return {region->host + (address - region->base), region, address - region->base};
    }
    const bool is_allowed = m.config.allow_unknown_memory || !(m.config.checks & kCheckBounds);
    if (!is_allowed || region)
        m.fatal("bounds",
                format("%lu bytes at %s", static_cast<unsigned long>(bytes), m.memory.describe(address).c_str()), &w,
                &op);
    return {reinterpret_cast<uint8_t*>(address)};
}

// Whether synchronisation at these scopes connects the two threads.
static bool is_in_scope(const Warp& w, const SyncVariable& s, Scope scope) {
    const int needed = s.cta == w.cta                  ? kScopeCta
                       : s.cluster == w.cta->cluster   ? kScopeCluster
                       : s.rank == w.cta->launch->rank ? kScopeGpu
                                                       : kScopeSys;
    return std::min<int>(s.scope, scope) >= needed;
}

void release_to(Warp& w, const Place& place, Semantics semantics, Scope scope, bool is_rmw) {
    SyncVariable& s = Machine::get().memory.sync_variables[reinterpret_cast<Addr>(place.host)];
    const bool is_first = s.order.seen.empty();
    if (!is_rmw) s.order.clear();
    const bool releases = semantics == kRelease || semantics == kAcquireRelease;
    s.scope = is_rmw && !is_first ? std::min<int>(s.scope, scope) : scope;
    s.cta = w.cta, s.cluster = w.cta->cluster, s.rank = w.cta->launch->rank;
    if (releases) {
        s.order.join(w.order);
        w.raise_clock();
    } else if (w.has_fence) {
        s.order.join(w.at_fence);
        s.scope = std::min(s.scope, w.fence_scope);
    }
}

void acquire_from(Warp& w, const Place& place, Semantics semantics, Scope scope) {
    auto& variables = Machine::get().memory.sync_variables;
    auto found = variables.find(reinterpret_cast<Addr>(place.host));
    if (found == variables.end() || !is_in_scope(w, found->second, scope)) return;
    if (semantics == kAcquire || semantics == kAcquireRelease)
        w.order.join(found->second.order);
    else
        w.observed.join(found->second.order);
}

void fence(Warp& w, Scope scope, bool acquires, bool releases) {
    if (acquires) {
        w.order.join(w.observed);
        w.observed.clear();
    }
    if (releases) {
        w.at_fence = w.order;
        w.fence_scope = scope;
        w.has_fence = true;
        w.raise_clock();
    }
}

namespace {

// The modifiers of a memory instruction, packed into Op::x.
struct MemoryOp {
    uint32_t space : 3, semantics : 3, scope : 2, is_wide : 1, is_read_only : 1, is_param : 1, is_signed : 1;
};
MemoryOp unpack(uint32_t x) {
    return __builtin_bit_cast(MemoryOp, x);
}

void lane_addresses(const Warp& w, const Op& op, Ref base, bool is_wide, Addr* addresses) {
    if (base == kNoRef) {
        for (int i = 0; i < kLanes; ++i) addresses[i] = op.imm;
    } else if (is_wide) {
        const auto* a = w.at<uint64_t>(base);
        for (int i = 0; i < kLanes; ++i) addresses[i] = a[i] + op.imm;
    } else {
        const auto* a = w.at<uint32_t>(base);
        for (int i = 0; i < kLanes; ++i) addresses[i] = a[i] + static_cast<uint32_t>(op.imm);
    }
}

// Neighbouring lanes mostly touch one range: they are checked together.
class RangeChecker {
  public:
    RangeChecker(Warp& w, const Op& op, uint8_t kind) : machine_(Machine::get()), actor_(w.actor(op)), kind_(kind) {}
    ~RangeChecker() { flush(); }
    void add(const Place& p, uint64_t bytes) {
        if (!p.region) return;
        if (p.region == region_ && p.offset == end_) {
            end_ += bytes;
            return;
        }
        flush();
        region_ = p.region, begin_ = p.offset, end_ = p.offset + bytes;
    }

  private:
    void flush() {
        if (region_) check_access(machine_, *region_, begin_, end_ - begin_, kind_, actor_);
        region_ = nullptr;
    }
    Machine& machine_;
    Actor actor_;
    uint8_t kind_;
    Region* region_ = nullptr;
    uint64_t begin_ = 0, end_ = 0;
};

void check_not_mbarrier(Warp& w, const Op& op, const Place& p, uint64_t bytes) {
    if (!p.cta || p.cta->mbarriers.empty()) return;
    for (uint64_t at = p.offset / 8 * 8; at < p.offset + bytes; at += 8)
        if (p.cta->mbarriers.count(static_cast<uint32_t>(at)))
            Machine::get().fatal(
                "barrier", format("ordinary access to the mbarrier at shared+%lu", static_cast<unsigned long>(at)), &w,
                &op);
}

// A strong load that keeps finding the same value is polling: others should run.
Status after_poll(Warp& w, uint64_t value) {
    Machine& m = Machine::get();
    if (w.poll_pc == w.pc && w.poll_value == value) {
        ++w.polls;
        if (w.polls < 3) return Status::kNext;
        w.wait.kind = WaitKind::kSleep;
        m.sleep(w, 1 + w.random() % std::min<uint64_t>(8ull << std::min(w.polls, 8u), 2000));
        return Status::kYield;
    }
    w.poll_pc = w.pc, w.poll_value = value, w.polls = 0;
    return Status::kNext;
}

template <int kBytes, bool kWideDest>
Status load(Warp& w, const Op& op, uint32_t mask) {
    const MemoryOp how = unpack(op.x);
    const uint32_t count = op.num_ext, bytes = kBytes * count;
    Addr addresses[kLanes];
    lane_addresses(w, op, op.a, how.is_wide, addresses);
    uint64_t values[4][kLanes];
    const bool is_strong = how.semantics != kWeak;
    uint64_t polled = 0;
    {
        RangeChecker checker(w, op, (is_strong ? kStrong : 0) | (how.is_read_only ? kReadOnly : 0));
        for (int lane = 0; lane < kLanes; ++lane) {
            if (!(mask >> lane & 1)) continue;
            const Place p = how.is_param ? Place{w.cta->launch->params + op.imm}
                                         : resolve(w, op, static_cast<Space>(how.space), addresses[lane], bytes, bytes,
                                                   false, lane);
            if (is_strong) acquire_from(w, p, static_cast<Semantics>(how.semantics), static_cast<Scope>(how.scope));
            check_not_mbarrier(w, op, p, bytes);
            checker.add(p, bytes);
            for (uint32_t k = 0; k < count; ++k) {
                uint64_t v = 0;
                memcpy(&v, p.host + k * kBytes, kBytes);
                if (how.is_signed && kBytes < 8) {
                    const int shift = 64 - 8 * kBytes;
                    v = static_cast<uint64_t>(static_cast<int64_t>(v << shift) >> shift);
                }
                values[k][lane] = v;
                polled = polled * 31 + v;
            }
        }
    }
    for (uint32_t k = 0; k < count; ++k) {
        const Ref to = w.program->ext[op.ext + k];
        if (to == kNoRef) continue;
        if constexpr (kWideDest) {
            store_lanes(w.at<uint64_t>(to), values[k], mask);
        } else {
            auto* lanes = w.at<uint32_t>(to);
            for (int i = 0; i < kLanes; ++i) lanes[i] = mask >> i & 1 ? static_cast<uint32_t>(values[k][i]) : lanes[i];
        }
    }
    return is_strong ? after_poll(w, polled) : Status::kNext;
}

template <int kBytes, bool kWideSource>
Status store(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    const MemoryOp how = unpack(op.x);
    const uint32_t count = op.num_ext, bytes = kBytes * count;
    Addr addresses[kLanes];
    lane_addresses(w, op, op.a, how.is_wide, addresses);
    const bool is_strong = how.semantics != kWeak;
    RangeChecker checker(w, op, kWrite | (is_strong ? kStrong : 0));
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const Place p = resolve(w, op, static_cast<Space>(how.space), addresses[lane], bytes, bytes, true, lane);
        check_not_mbarrier(w, op, p, bytes);
        checker.add(p, bytes);
        uint8_t value[32];
        for (uint32_t k = 0; k < count; ++k) {
            const Ref from = w.program->ext[op.ext + k];
            const uint64_t v = kWideSource ? w.at<uint64_t>(from)[lane] : w.at<uint32_t>(from)[lane];
            memcpy(value + k * kBytes, &v, kBytes);
        }
        if (p.region && memcmp(p.host, value, bytes) != 0) m.progress();
        memcpy(p.host, value, bytes);
        if (is_strong) release_to(w, p, static_cast<Semantics>(how.semantics), static_cast<Scope>(how.scope), false);
    }
    return Status::kNext;
}

Space take_space(Decoder& d) {
    if (d.take("global") || d.take("const")) return kGlobalSpace;
    if (d.take("shared") || d.take("shared::cta") || d.take("shared::cluster")) return kSharedSpace;
    if (d.take("local")) return kLocalSpace;
    return kGenericSpace;
}

Semantics take_semantics(Decoder& d) {
    if (d.take("relaxed") || d.take("volatile") || d.take("mmio")) return kRelaxed;
    if (d.take("acquire")) return kAcquire;
    if (d.take("release")) return kRelease;
    if (d.take("acq_rel")) return kAcquireRelease;
    d.take("weak");
    return kWeak;
}

Scope take_scope(Decoder& d, Scope otherwise) {
    if (d.take("cta")) return kScopeCta;
    if (d.take("cluster")) return kScopeCluster;
    if (d.take("gpu")) return kScopeGpu;
    if (d.take("sys")) return kScopeSys;
    return otherwise;
}

bool take_cache_hints(Decoder& d) {
    d.take_one({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
    d.take_one({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"});
    d.take_one({"L2::evict_normal", "L2::evict_first", "L2::evict_last"});
    d.take_one({"L2::64B", "L2::128B", "L2::256B"});
    return d.take("L2::cache_hint");
}

// The address operand into op.a and op.imm; `how` gets its width, and its space where the symbol says it.
void memory_address(Decoder& d, const Operand& o, MemoryOp& how) {
    const auto address = d.address(o);
    d.op.a = address.base;
    d.op.imm = static_cast<uint64_t>(address.offset);
    how.is_wide = address.is_wide;
    how.is_param = address.is_entry_param;
    if (address.space == "local") how.space = kLocalSpace;
}

MemoryOp common_modifiers(Decoder& d, bool is_param) {
    MemoryOp how{};
    const bool is_volatile = std::find(d.modifiers.begin(), d.modifiers.end(), "volatile") != d.modifiers.end();
    how.space = is_param ? kGenericSpace : take_space(d);
    how.semantics = take_semantics(d);
    how.scope = take_scope(d, is_volatile ? kScopeSys : kScopeGpu);
    return how;
}

uint32_t take_vector(Decoder& d) {
    return d.take("v2") ? 2 : d.take("v4") ? 4 : 1;
}

template <template <int, bool> class Pick>
Handler pick_width(Decoder& d, int bytes, bool is_wide) {
    if (bytes == 1) return is_wide ? Pick<1, true>::handler() : Pick<1, false>::handler();
    if (bytes == 2) return is_wide ? Pick<2, true>::handler() : Pick<2, false>::handler();
    if (bytes == 4) return is_wide ? Pick<4, true>::handler() : Pick<4, false>::handler();
    if (bytes == 8 && is_wide) return Pick<8, true>::handler();
    d.fail("unsupported width");
}
template <int kBytes, bool kWide>
struct PickLoad {
    static Handler handler() { return &load<kBytes, kWide>; }
};
template <int kBytes, bool kWide>
struct PickStore {
    static Handler handler() { return &store<kBytes, kWide>; }
};

bool is_wide_operand(Decoder& d, const Operand& o) {
    if (o.kind != Operand::kVector) return d.is_wide(o);
    for (auto& e : o.elements)
        if (e.kind != Operand::kSink) return d.is_wide(e);
    return false;
}

void decode_load(Decoder& d) {
    const bool is_param = d.take("param") || d.take("param::entry") || d.take("param::func");
    MemoryOp how = common_modifiers(d, is_param);
    how.is_read_only = d.take("nc");
    take_cache_hints(d);
    const uint32_t vector = take_vector(d);
    const std::string type = d.type();
    how.is_signed = type[0] == 's';
    memory_address(d, d.operand(1), how);
    const bool is_wide = is_wide_operand(d, d.operand(0));
    d.push_dest(d.operand(0), is_wide ? 8 : 4);
    if (d.ext.size() != vector) d.fail("wrong number of vector elements");
    d.op.x = __builtin_bit_cast(uint32_t, how);
    d.op.fn = pick_width<PickLoad>(d, static_cast<int>(type_size(type)), is_wide);
}

void decode_store(Decoder& d) {
    const bool is_param = d.take("param") || d.take("param::func");
    MemoryOp how = common_modifiers(d, is_param);
    take_cache_hints(d);
    const uint32_t vector = take_vector(d);
    const int bytes = static_cast<int>(type_size(d.type()));
    memory_address(d, d.operand(0), how);
    if (how.is_param) d.fail("store to a kernel parameter");
    const bool is_wide = bytes == 8 || is_wide_operand(d, d.operand(1));
    d.push_source(d.operand(1), is_wide ? 8 : 4);
    if (d.ext.size() != vector) d.fail("wrong number of vector elements");
    d.op.x = __builtin_bit_cast(uint32_t, how);
    d.op.fn = pick_width<PickStore>(d, bytes, is_wide);
}

// Atomics (9.7.13.6, 9.7.13.7): lanes one after the other, in random order.

template <class T>
T atomic_add(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
    } else if constexpr (std::is_floating_point_v<T>) {
        return a + b;
    } else if constexpr (std::is_same_v<T, BfloatPair>) {
        uint32_t r = 0;
        for (int shift : {0, 16}) {
            const float x = to_float(Bfloat{uint16_t(a.bits >> shift)}),
                        y = to_float(Bfloat{uint16_t(b.bits >> shift)});
            r |= uint32_t{to_bfloat(x + y).bits} << shift;
        }
        return {r};
    } else if constexpr (std::is_same_v<T, HalfPair>) {
        uint32_t r = 0;
        for (int shift : {0, 16}) {
            const float x = to_float(Half{uint16_t(a.bits >> shift)}), y = to_float(Half{uint16_t(b.bits >> shift)});
            r |= uint32_t{to_half(x + y).bits} << shift;
        }
        return {r};
    }
}

enum AtomicKind { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };

template <AtomicKind kKind, class T>
T combine(T old, T b, T c) {
    if constexpr (kKind == kAdd) return atomic_add(old, b);
    if constexpr (kKind == kExch) return b;
    if constexpr (std::is_integral_v<T>) {
        if constexpr (kKind == kMin) return std::min(old, b);
        if constexpr (kKind == kMax) return std::max(old, b);
        if constexpr (kKind == kAnd) return old & b;
        if constexpr (kKind == kOr) return old | b;
        if constexpr (kKind == kXor) return old ^ b;
        if constexpr (kKind == kCas) return old == b ? c : old;
        if constexpr (kKind == kInc) return old >= b ? T(0) : static_cast<T>(old + 1);
        if constexpr (kKind == kDec) return old == 0 || old > b ? b : static_cast<T>(old - 1);
    }
    return old;
}

template <AtomicKind kKind, class T>
Status atomic(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    const MemoryOp how = unpack(op.x);
    Addr addresses[kLanes];
    lane_addresses(w, op, op.a, how.is_wide, addresses);
    const auto* b = w.at<SlotOf<T>>(op.b);
    const auto* c = op.c == kNoRef ? b : w.at<SlotOf<T>>(op.c);
    auto* d = op.d == kNoRef ? nullptr : w.at<SlotOf<T>>(op.d);
    const auto semantics = static_cast<Semantics>(how.semantics);
    const auto scope = static_cast<Scope>(how.scope);
    bool has_changed = false;
    uint64_t polled = 0;
    const int first = static_cast<int>(w.random() % kLanes);
    for (int i = 0; i < kLanes; ++i) {
        const int lane = (first + i) % kLanes;
        if (!(mask >> lane & 1)) continue;
        const Place p =
            resolve(w, op, static_cast<Space>(how.space), addresses[lane], sizeof(T), sizeof(T), true, lane);
        check_not_mbarrier(w, op, p, sizeof(T));
        if (p.region) check_access(m, *p.region, p.offset, sizeof(T), kWrite | kStrong, w.actor(op));
        T old;
        memcpy(&old, p.host, sizeof(T));
        const T value = combine<kKind, T>(old, from_slot<T>(b[lane]), from_slot<T>(c[lane]));
        acquire_from(w, p, semantics, scope);
        if (memcmp(&old, &value, sizeof(T)) != 0) has_changed = true;
        memcpy(p.host, &value, sizeof(T));
        release_to(w, p, semantics, scope, true);
        polled = polled * 31 + to_slot<T>(old);
        if (d) d[lane] = to_slot<T>(old);
    }
    if (has_changed) {
        m.progress();
        return Status::kNext;
    }
    return after_poll(w, polled);
}

template <AtomicKind kKind>
Handler pick_atomic(Decoder& d, const std::string& t) {
    if (t == "u32" || t == "b32") return &atomic<kKind, uint32_t>;
    if (t == "s32") return &atomic<kKind, int32_t>;
    if (t == "u64" || t == "b64") return &atomic<kKind, uint64_t>;
    if (t == "s64") return &atomic<kKind, int64_t>;
    if (kKind == kCas && t == "b16") return &atomic<kKind, uint16_t>;
    if (kKind == kAdd && t == "f32") return &atomic<kKind, float>;
    if (kKind == kAdd && t == "f64") return &atomic<kKind, double>;
    if (kKind == kAdd && t == "f16x2") return &atomic<kKind, HalfPair>;
    if (kKind == kAdd && t == "bf16x2") return &atomic<kKind, BfloatPair>;
    d.fail("unsupported type ." + t);
}

// red.global.add.v4.f32 and the like (sm_90): each element is an atomic of its own.
template <class T>
Status vector_reduce(Warp& w, const Op& op, uint32_t mask) {
    Op single = op;
    for (uint32_t k = 0; k < op.num_ext; ++k) {
        single.imm = op.imm + k * sizeof(T);
        single.b = w.program->ext[op.ext + k];
        atomic<kAdd, T>(w, single, mask);
    }
    return Status::kNext;
}

template <bool kReturns>
void decode_atomic(Decoder& d) {
    MemoryOp how = common_modifiers(d, false);
    if (how.semantics == kWeak) how.semantics = kRelaxed;  // the default (9.7.13.6)
    take_cache_hints(d);
    d.take("noftz");
    const uint32_t vector = take_vector(d);
    const std::string kind = d.require_one({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
    const std::string t = d.type();
    const int bytes = static_cast<int>(type_size(t));
    size_t next = kReturns;
    memory_address(d, d.operand(next++), how);
    d.op.x = __builtin_bit_cast(uint32_t, how);
    if (vector > 1) {
        if (kReturns || kind != "add") d.fail("unsupported vector form");
        d.push_source(d.operand(next), bytes);
        d.op.fn = t == "f32" ? &vector_reduce<float> : t == "bf16x2" ? &vector_reduce<BfloatPair> : nullptr;
        return;
    }
    d.op.b = d.source(next++, bytes);
    if (kind == "cas") d.op.c = d.source(next++, bytes);
    if (kReturns && d.operand(0).kind != Operand::kSink) d.op.d = d.dest(size_t{0}, bytes);
    d.op.fn = kind == "add"    ? pick_atomic<kAdd>(d, t)
              : kind == "min"  ? pick_atomic<kMin>(d, t)
              : kind == "max"  ? pick_atomic<kMax>(d, t)
              : kind == "and"  ? pick_atomic<kAnd>(d, t)
              : kind == "or"   ? pick_atomic<kOr>(d, t)
              : kind == "xor"  ? pick_atomic<kXor>(d, t)
              : kind == "exch" ? pick_atomic<kExch>(d, t)
              : kind == "cas"  ? pick_atomic<kCas>(d, t)
              : kind == "inc"  ? pick_atomic<kInc>(d, t)
                               : pick_atomic<kDec>(d, t);
}

// Fences (9.7.13.4)

Status do_fence(Warp& w, const Op& op, uint32_t) {
    fence(w, static_cast<Scope>(op.x), op.y & 1, op.y & 2);
    return Status::kNext;
}
Status do_proxy_fence(Warp& w, const Op&, uint32_t) {
    w.order.fenced.join(w.order.seen);
    w.raise_clock();
    return Status::kNext;
}
Status do_mbarrier_init_fence(Warp& w, const Op&, uint32_t) {
    for (auto& [offset, b] : w.cta->mbarriers)
        if (b.init_entity == w.entity) b.is_fenced = true;
    fence(w, kScopeCluster, false, true);
    return Status::kNext;
}
Status nothing(Warp&, const Op&, uint32_t) {
    return Status::kNext;
}

void decode_fence(Decoder& d) {
    if (d.take("mbarrier_init")) {
        d.take("release"), d.take("cluster");
        d.op.fn = &do_mbarrier_init_fence;
    } else if (d.take("proxy")) {
        d.take_one({"global", "shared::cta", "shared::cluster"});
        if (d.take("async")) {
            d.op.fn = &do_proxy_fence;
        } else if (d.take("alias")) {
            d.op.fn = &nothing;
        } else {
            d.fail("unsupported proxy");
        }
    } else {
        const std::string semantics = d.take_one({"sc", "acq_rel", "acquire", "release"});
        d.op.x = take_scope(d, kScopeSys);
        d.op.y = semantics == "acquire" ? 1 : semantics == "release" ? 2 : 3;
        d.op.fn = &do_fence;
    }
    d.expect_operands(0, 0);
}
void decode_membar(Decoder& d) {
    const std::string scope = d.require_one({"cta", "gl", "sys", "gpu"});
    d.op.x = scope == "cta" ? kScopeCta : scope == "sys" ? kScopeSys : kScopeGpu;
    d.op.y = 3;
    d.op.fn = &do_fence;
}

// Address conversions

template <class T, bool kToSpace>
Status convert_address(Warp& w, const Op& op, uint32_t mask) {
    const auto* a = w.at<T>(op.a);
    T r[kLanes];
    const Addr window = op.x == kSharedSpace ? kSharedWindow : op.x == kLocalSpace ? kLocalWindow : 0;
    for (int i = 0; i < kLanes; ++i) r[i] = static_cast<T>(kToSpace ? a[i] - window : a[i] + op.imm + window);
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}
template <class T>
Status symbol_address(Warp& w, const Op& op, uint32_t mask) {
    const auto* base = op.a == kNoRef ? nullptr : w.at<uint32_t>(op.a);
    const Addr window = op.x == kSharedSpace ? kSharedWindow : op.x == kLocalSpace ? kLocalWindow : 0;
    T r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = static_cast<T>((base ? base[i] : 0) + op.imm + window);
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}

void decode_cvta(Decoder& d) {
    const bool to = d.take("to");
    d.take_one({"param", "param::entry"});
    d.op.x = take_space(d);
    const int bytes = static_cast<int>(type_size(d.type()));
    if (d.operand(1).kind == Operand::kSymbol) {
        const auto address = d.address(d.operand(1));
        if (to || address.is_entry_param) d.fail("unsupported symbol");
        d.op.a = address.base;
        d.op.imm = static_cast<uint64_t>(address.offset);
        d.op.fn = bytes == 8 ? &symbol_address<uint64_t> : &symbol_address<uint32_t>;
    } else {
        d.op.a = d.source(1, bytes);
        if (bytes == 8)
            d.op.fn = to ? &convert_address<uint64_t, true> : &convert_address<uint64_t, false>;
        else
            d.op.fn = to ? &convert_address<uint32_t, true> : &convert_address<uint32_t, false>;
    }
    d.op.d = d.dest(size_t{0}, bytes);
}

Status is_space(Warp& w, const Op& op, uint32_t mask) {
    const auto* a = w.at<uint64_t>(op.a);
    uint32_t r = 0;
    for (int i = 0; i < kLanes; ++i) {
        const Space space = a[i] >> 56 == kSharedWindow >> 56  ? kSharedSpace
                            : a[i] >> 56 == kLocalWindow >> 56 ? kLocalSpace
                                                               : kGlobalSpace;
        bool v = space == op.x;
        if (op.y && v) v = (static_cast<uint32_t>(a[i]) >> kSharedRankShift) == w.cta->rank;
        r |= static_cast<uint32_t>(v) << i;
    }
    w.set_predicate(op.pd, r, mask);
    return Status::kNext;
}
void decode_isspacep(Decoder& d) {
    d.op.y = std::find(d.modifiers.begin(), d.modifiers.end(), "shared::cluster") == d.modifiers.end();
    d.op.x = take_space(d);
    if (d.op.x != kSharedSpace) d.op.y = 0;
    d.predicate_dest(0);
    d.op.a = d.source(1, 8);
    d.op.fn = &is_space;
}

template <class T>
Status map_address(Warp& w, const Op& op, uint32_t mask) {  // 9.7.9.23
    const auto* a = w.at<T>(op.a);
    const auto* rank = w.at<uint32_t>(op.b);
    T r[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t shared = (static_cast<uint32_t>(a[i]) & kSharedOffsetMask) | rank[i] << kSharedRankShift;
        r[i] = static_cast<T>((a[i] & ~T(0xffffffff)) | shared);
        if ((mask >> i & 1) && rank[i] >= w.cta->cluster->ctas.size())
            Machine::get().fatal(
                "bounds", format("mapa: rank %u in a cluster of %zu", rank[i], w.cta->cluster->ctas.size()), &w, &op);
    }
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}
void decode_mapa(Decoder& d) {
    take_space(d);
    const int bytes = static_cast<int>(type_size(d.type()));
    d.op.a = d.source(1, bytes), d.op.b = d.source(2, 4);
    d.op.d = d.dest(size_t{0}, bytes);
    d.op.fn = bytes == 8 ? &map_address<uint64_t> : &map_address<uint32_t>;
}

template <class T>
Status get_rank(Warp& w, const Op& op, uint32_t mask) {
    const auto* a = w.at<T>(op.a);
    uint32_t r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = static_cast<uint32_t>(a[i]) >> kSharedRankShift;
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}
void decode_getctarank(Decoder& d) {
    take_space(d);
    const int bytes = static_cast<int>(type_size(d.type()));
    d.op.a = d.source(1, bytes);
    d.op.d = d.dest(size_t{0}, 4);
    d.op.fn = bytes == 8 ? &get_rank<uint64_t> : &get_rank<uint32_t>;
}

void decode_hint(Decoder& d) {
    d.modifiers.clear();
    d.op.fn = &nothing;
}

Status make_policy(Warp& w, const Op& op, uint32_t mask) {
    uint64_t zero[kLanes] = {};
    store_lanes(w.at<uint64_t>(op.d), zero, mask);
    return Status::kNext;
}
void decode_createpolicy(Decoder& d) {
    d.modifiers.clear();
    d.op.d = d.dest(size_t{0}, 8);
    d.op.fn = &make_policy;
}

}  // namespace

const InstructionTable kMemoryInstructions = {
    {"ld", "9.7.9.8", "load: any space, vectors, .nc, weak or strong; cache hints mean nothing", decode_load},
    {"ldu", "9.7.9.10", "load, as ld", decode_load},
    {"st", "9.7.9.11", "store, as ld", decode_store},
    {"atom", "9.7.13.6", "atomic read-modify-write, lanes in random order", decode_atomic<true>},
    {"red", "9.7.13.7", "atomic without a result; .v2 and .v4 of f32 and bf16x2 add", decode_atomic<false>},
    {"fence", "9.7.13.4", "memory fence; .proxy.async; .mbarrier_init", decode_fence},
    {"membar", "9.7.13.4", "memory fence", decode_membar},
    {"cvta", "9.7.9.21", "between generic and other addresses", decode_cvta},
    {"isspacep", "9.7.9.20", "whether a generic address lies in a space", decode_isspacep},
    {"mapa", "9.7.9.23", "the address in another CTA's shared memory", decode_mapa},
    {"getctarank", "9.7.9.24", "the CTA that a shared address belongs to", decode_getctarank},
    {"prefetch", "9.7.9.15", "does nothing", decode_hint},
    {"prefetchu", "9.7.9.15", "does nothing", decode_hint},
    {"applypriority", "9.7.9.16", "does nothing", decode_hint},
    {"discard", "9.7.9.17", "does nothing", decode_hint},
    {"createpolicy", "9.7.9.18", "cache policies mean nothing here", decode_createpolicy},
};

}  // namespace moksim
