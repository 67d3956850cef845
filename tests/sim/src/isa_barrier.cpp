// Barriers of a CTA, of a cluster, mbarriers and the register pool (PTX ISA 9.7.13.1, 9.7.13.3, 9.7.13.15, 9.7.19.5).
#include "isa.h"
#include "sync.h"

namespace moksim {

Mbarrier& find_mbarrier(Warp& w, const Op& op, uint32_t address, Cta** owner) {
    Cta& cta = cta_of(w, op, address);
    if (owner) *owner = &cta;
    auto found = cta.mbarriers.find(address & kSharedOffsetMask);
    if (found == cta.mbarriers.end())
        Machine::get().fatal(
            "barrier", format("no mbarrier at shared+%u of CTA %u", address & kSharedOffsetMask, cta.index), &w, &op);
    Mbarrier& b = found->second;
    if (w.order.seen[b.init_entity] < b.init_clock && (Machine::get().config.checks & kCheckRace))
        Machine::get().report("race",
                              format("mbarrier shared+%u used without ordering after its mbarrier.init\n  at %s\n"
                                     "  by %s",
                                     b.offset, Machine::get().source(op.id).c_str(), name_of(w).c_str()),
                              op.id);
    return b;
}

void mbarrier_update(Machine& m, Cta& cta, Mbarrier& b, uint32_t count, int64_t tx_change, const Order* order,
                     uint32_t op) {
    if (count > b.pending)
        m.fatal("barrier",
                format("mbarrier shared+%u of CTA %u: %u arrivals, but only %u of %u are still expected in "
                       "phase %u\n  at %s",
                       b.offset, cta.index, count, b.pending, b.expected, b.phase, m.source(op).c_str()),
                nullptr, nullptr);
    m.progress();
    b.pending -= count;
    b.tx += tx_change;
    if (tx_change < 0) b.copied = b.phase + 1;
    if (std::abs(b.tx) >= 1 << 20)
        m.fatal("barrier",
                format("mbarrier shared+%u of CTA %u: transaction count %ld out of range\n  at %s", b.offset, cta.index,
                       static_cast<long>(b.tx), m.source(op).c_str()),
                nullptr, nullptr);
    if (order) b.arriving.join(*order);
    if (b.pending || b.tx) return;
    ++b.phase;
    b.pending = b.expected;
    b.complete.join(b.arriving);
    // Whoever waits sees this phase's copies; their writes are visible to both proxies (9.7.9.27.3).
    b.complete.seen.raise(b.entity, b.clock_base + b.phase);
    b.complete.fenced.raise(b.entity, b.clock_base + b.phase);
    m.wake(b.waiters);
}

namespace {

// Named barriers: arrivals are counted in threads, a warp for all of its lanes where the instruction is .aligned.

enum BarrierKind { kSync, kArrive, kReduce };

NamedBarrier& named_barrier(Warp& w, const Op& op, uint32_t mask, uint32_t* number, uint32_t* count) {
    const int lane = __builtin_ctz(mask);
    *number = op.a == kNoRef ? static_cast<uint32_t>(op.imm) : w.at<uint32_t>(op.a)[lane];
    const uint32_t threads = w.cta->launch->block[0] * w.cta->launch->block[1] * w.cta->launch->block[2];
    *count = op.b == kNoRef ? (threads + kLanes - 1) / kLanes * kLanes : w.at<uint32_t>(op.b)[lane];
    if (*number >= 16) Machine::get().fatal("barrier", format("barrier %u of 16", *number), &w, &op);
    if (*count == 0 || *count % kLanes)
        Machine::get().fatal("barrier", format("thread count %u is not a multiple of 32", *count), &w, &op);
    return w.cta->barriers[*number];
}

template <BarrierKind kKind>
Status barrier(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    uint32_t number, count;
    NamedBarrier& b = named_barrier(w, op, mask, &number, &count);
    if (w.ticket == 0) {
        if (b.arrived && b.expected != count)
            m.fatal(
                "barrier",
                format("barrier %u: %u threads expected here, %u by those who came before", number, count, b.expected),
                &w, &op);
        b.expected = count;
        b.arrived += op.x ? kLanes : __builtin_popcount(mask);
        b.arriving.join(w.order);
        w.raise_clock();
        m.progress();
        if (kKind == kReduce) {
            const uint32_t p = w.predicate(op.ps, op.ps_negated) & mask;
            b.or_bits |= p != 0, b.and_bits &= p == mask, b.count += __builtin_popcount(p);
        }
        if (b.arrived > b.expected)
            m.fatal("barrier", format("barrier %u: %u threads came, %u were expected", number, b.arrived, b.expected),
                    &w, &op);
        w.ticket = b.generation;
        if (b.arrived == b.expected) {
            ++b.generation;
            b.arrived = 0;
            b.complete = std::move(b.arriving);
            b.arriving.clear();
            b.result_or = b.or_bits, b.result_and = b.and_bits, b.result_count = b.count;
            b.or_bits = 0, b.and_bits = 1, b.count = 0;
            m.wake(b.waiters);
        }
    }
    if (kKind != kArrive) {
        if (b.generation == w.ticket) {
            w.wait = {WaitKind::kBarrier, number, 0};
            b.waiters.push_back(&w);
            return Status::kBlock;
        }
        w.order.join(b.complete);
        if (kKind == kReduce) {
            if (op.y == 2) {
                uint32_t r[kLanes];
                for (auto& v : r) v = b.result_count;
                store_lanes(w.at<uint32_t>(op.d), r, mask);
            } else {
                w.set_predicate(op.pd, (op.y ? b.result_or : b.result_and) ? kAllLanes : 0, mask);
            }
        }
    }
    w.ticket = 0;
    return Status::kNext;
}

void decode_barrier(Decoder& d, bool is_aligned) {
    d.take("cta");
    is_aligned |= d.take("aligned");
    const std::string kind = d.require_one({"sync", "arrive", "red"});
    const std::string reduction = kind == "red" ? d.require_one({"popc", "and", "or"}) : "";
    size_t i = 0;
    if (kind == "red") {
        d.type();
        if (reduction == "popc")
            d.op.d = d.dest(i++, 4);
        else
            d.predicate_dest(i++);
        d.op.y = reduction == "popc" ? 2 : reduction == "or";
    }
    if (d.operand(i).kind == Operand::kImmediate)
        d.op.imm = d.immediate(i);
    else
        d.op.a = d.source(i, 4);
    ++i;
    if (i < d.size() && !d.is_predicate(i)) d.op.b = d.source(i++, 4);
    if (kind == "red") d.predicate_source(i++);
    d.expect_operands(i, i);
    d.op.x = is_aligned;
    if (is_aligned) d.op.flags |= kConverged;
    d.op.fn = kind == "sync" ? &barrier<kSync> : kind == "arrive" ? &barrier<kArrive> : &barrier<kReduce>;
}

// barrier.cluster

Status cluster_arrive(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    Cluster& c = *w.cta->cluster;
    c.arrived += __builtin_popcount(mask);
    if (c.arrived > c.expected) m.fatal("barrier", "barrier.cluster: a thread arrived twice", &w, &op);
    if (op.x) {
        c.arriving.join(w.order);
        w.raise_clock();
    }
    m.progress();
    w.cluster_ticket = c.generation;
    if (c.arrived == c.expected) {
        ++c.generation;
        c.arrived = 0;
        c.complete = std::move(c.arriving);
        c.arriving.clear();
        m.wake(c.waiters);
    }
    return Status::kNext;
}

Status cluster_wait(Warp& w, const Op& op, uint32_t) {
    Cluster& c = *w.cta->cluster;
    if (!w.cluster_ticket) Machine::get().fatal("barrier", "barrier.cluster.wait without arrive", &w, &op);
    if (c.generation == w.cluster_ticket) {
        w.wait = {WaitKind::kCluster, 0, 0};
        c.waiters.push_back(&w);
        return Status::kBlock;
    }
    w.order.join(c.complete);
    return Status::kNext;
}

void decode_cluster(Decoder& d) {
    const std::string kind = d.require_one({"arrive", "wait"});
    const std::string semantics = d.take_one({"release", "relaxed", "acquire"});
    if (d.take("aligned")) d.op.flags |= kConverged;
    d.op.x = semantics != "relaxed";
    d.op.fn = kind == "arrive" ? &cluster_arrive : &cluster_wait;
}

// mbarrier. Op::a, Op::imm: address. Op::x: see the handlers.

uint32_t shared_address(const Warp& w, const Op& op, int lane) {
    if (op.a == kNoRef) return static_cast<uint32_t>(op.imm);
    const bool is_wide = op.y & 1;
    const uint64_t base = is_wide ? w.at<uint64_t>(op.a)[lane] : w.at<uint32_t>(op.a)[lane];
    return static_cast<uint32_t>(base + op.imm);
}

void decode_address(Decoder& d, size_t i) {
    const auto address = d.address(d.operand(i));
    d.op.a = address.base;
    d.op.imm = static_cast<uint64_t>(address.offset);
    d.op.y = address.is_wide;
}

void take_shared(Decoder& d) {
    d.take("shared"), d.take("shared::cta"), d.take("shared::cluster");
}

Status mbarrier_init(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const uint32_t address = shared_address(w, op, lane);
        const Place p = resolve(w, op, kSharedSpace, address, 8, 8, true);
        if (p.cta != w.cta) m.fatal("barrier", "mbarrier.init in another CTA's shared memory", &w, &op);
        const uint32_t count = w.at<uint32_t>(op.b)[lane];
        if (count == 0 || count >= 1 << 20) m.fatal("barrier", format("mbarrier.init with count %u", count), &w, &op);
        check_access(m, *p.region, p.offset, 8, kWrite, w.actor(op));
        Mbarrier& b = w.cta->mbarriers[static_cast<uint32_t>(p.offset)];
        if (b.expected && (b.pending != b.expected || b.tx || !b.waiters.empty()))
            m.fatal("barrier", format("mbarrier shared+%u initialised again while in use", b.offset), &w, &op);
        const uint32_t phases = b.phase;
        auto& entity = w.cta->launch->slots[w.cta->slot].mbarriers[static_cast<uint32_t>(p.offset)];
        if (!entity)
            entity = m.new_entity(format("rank %d slot %d copies of mbarrier shared+%lu", w.cta->launch->rank,
                                         w.cta->slot, static_cast<unsigned long>(p.offset)));
        const uint32_t base = b.expected ? b.clock_base + phases + 1 : m.entity_times[entity];
        b = Mbarrier{};
        b.offset = static_cast<uint32_t>(p.offset);
        b.expected = b.pending = count;
        b.entity = entity;
        b.clock_base = base;
        b.init_entity = w.entity;
        b.init_clock = w.clock;
    }
    return Status::kNext;
}

Status mbarrier_inval(Warp& w, const Op& op, uint32_t mask) {
    Mbarrier& b = find_mbarrier(w, op, shared_address(w, op, __builtin_ctz(mask)));
    if (b.pending != b.expected || b.tx)
        Machine::get().fatal("barrier", "mbarrier.inval of a barrier in the middle of a phase", &w, &op);
    Machine& m = Machine::get();
    m.entity_times[b.entity] = std::max(m.entity_times[b.entity], b.clock_base + b.phase + 1);
    w.cta->mbarriers.erase(b.offset);
    return Status::kNext;
}

// Op::x: bit 0 adds Op::c to the transaction count first, bit 1 arrives, bit 2 releases, bit 3 subtracts (complete_tx).
// The state result is the phase's number.
Status mbarrier_arrive(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Cta* owner;
        Mbarrier& b = find_mbarrier(w, op, shared_address(w, op, lane), &owner);
        const uint32_t count = op.x & 2 ? (op.b == kNoRef ? 1 : w.at<uint32_t>(op.b)[lane]) : 0;
        const int64_t tx = op.x & 1 ? w.at<uint32_t>(op.c)[lane] : 0;
        if (op.d != kNoRef) w.at<uint64_t>(op.d)[lane] = b.phase;
        mbarrier_update(m, *owner, b, count, op.x & 8 ? -tx : tx, op.x & 4 ? &w.order : nullptr, op.id);
    }
    if (op.x & 4) w.raise_clock();
    return Status::kNext;
}

void decode_arrive(Decoder& d) {
    const bool expects = d.take("expect_tx");
    if (d.take("noComplete")) d.fail(".noComplete is not supported");
    const std::string semantics = d.take_one({"release", "relaxed"});
    d.take_one({"cta", "cluster"});
    take_shared(d);
    d.take("b64");
    size_t i = 0;
    if (d.operand(0).kind != Operand::kAddress) {
        if (d.operand(0).kind == Operand::kRegister) d.op.d = d.dest(size_t{0}, 8);
        ++i;
    }
    decode_address(d, i++);
    d.op.x = 2 | (semantics == "relaxed" ? 0 : 4) | expects;
    if (expects)
        d.op.c = d.source(i++, 4);
    else if (i < d.size())
        d.op.b = d.source(i++, 4);
    d.expect_operands(i, i);
    d.op.fn = &mbarrier_arrive;
}

template <bool kExpect>
void decode_tx(Decoder& d) {
    d.take("relaxed"), d.take_one({"cta", "cluster"});
    take_shared(d);
    d.take("b64");
    decode_address(d, 0);
    d.op.c = d.source(1, 4);
    d.op.x = kExpect ? 1 : 9;
    d.op.fn = &mbarrier_arrive;
}

// Op::x: bit 0 acquires, bit 1 waits by parity, bit 2 may block (try_wait). All lanes of a warp see the same answer
// where they ask for the same barrier.
Status mbarrier_wait(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    uint32_t ready = 0;
    Mbarrier* blocked = nullptr;
    uint32_t parity = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Mbarrier& b = find_mbarrier(w, op, shared_address(w, op, lane));
        const uint64_t asked = op.x & 2 ? w.at<uint32_t>(op.b)[lane] : w.at<uint64_t>(op.b)[lane];
        if ((op.x & 2) && asked > 1) m.fatal("barrier", "parity is neither 0 nor 1", &w, &op);
        // The phase of that parity is complete if it is not the current one (9.7.13.15.16).
        const bool is_complete = op.x & 2 ? (b.phase & 1) != asked : b.phase > asked;
        if (!is_complete) {
            blocked = &b, parity = static_cast<uint32_t>(asked);
            continue;
        }
        ready |= 1u << lane;
        b.observed = b.phase;
        if (op.x & 1)
            w.order.join(b.complete);
        else
            w.observed.join(b.complete);
    }
    // The suspend time of try_wait is up to the system: now and then it is over at once.
    if (blocked && (op.x & 4) && w.free_tries == 0 && w.random() % 8) {
        w.wait = {WaitKind::kMbarrier, blocked->offset, parity};
        blocked->waiters.push_back(&w);
        return Status::kBlock;
    }
    if (blocked && !(op.x & 4)) {
        w.wait = {WaitKind::kMbarrier, blocked->offset, parity};
        m.sleep(w, 1 + w.random() % 64);
    }
    w.free_tries = blocked ? std::max(w.free_tries - 1, 0) : 0;
    w.set_predicate(op.pd, ready, mask);
    return blocked ? Status::kYield : Status::kNext;
}

template <bool kTry>
void decode_wait(Decoder& d) {
    const bool by_parity = d.take("parity");
    const std::string semantics = d.take_one({"acquire", "relaxed"});
    d.take_one({"cta", "cluster"});
    take_shared(d);
    d.take("b64");
    d.predicate_dest(0);
    decode_address(d, 1);
    d.op.b = d.source(2, by_parity ? 4 : 8);
    d.expect_operands(3, kTry ? 4 : 3);  // a suspend time hint means nothing
    if (d.size() == 4) d.source(3, 4);
    d.op.x = (semantics != "relaxed") | by_parity << 1 | kTry << 2;
    d.op.fn = &mbarrier_wait;
    d.op.flags |= kMmaSafe;
}

// setmaxnreg (9.7.19.5): each warp of the warpgroup takes its registers from the CTA's pool or gives them back.
template <bool kIncrease>
Status set_registers(Warp& w, const Op& op, uint32_t) {
    Machine& m = Machine::get();
    Cta& cta = *w.cta;
    if (cta.free_registers < 0) return Status::kNext;
    const int change = static_cast<int>(op.imm) - w.registers;
    if (kIncrease ? change < 0 : change > 0)
        m.fatal("barrier",
                format("setmaxnreg.%s to %lu from %d registers", kIncrease ? "inc" : "dec",
                       static_cast<unsigned long>(op.imm), w.registers),
                &w, &op);
    if (change * kLanes > cta.free_registers) {
        w.wait = {WaitKind::kRegisters, 0, 0};
        cta.register_waiters.push_back(&w);
        return Status::kBlock;
    }
    cta.free_registers -= change * kLanes;
    w.registers += change;
    if (change < 0) m.wake(cta.register_waiters);
    return Status::kNext;
}

void decode_setmaxnreg(Decoder& d) {
    const bool increase = d.require_one({"inc", "dec"}) == "inc";
    d.take("sync"), d.take("aligned"), d.take("u32");
    d.op.imm = d.immediate(0);
    if (d.op.imm < 24 || d.op.imm > 256 || d.op.imm % 8) d.fail("count must be a multiple of 8 in [24, 256]");
    d.op.flags |= kConverged;
    d.op.fn = increase ? &set_registers<true> : &set_registers<false>;
}

}  // namespace

const InstructionTable kBarrierInstructions = {
    {"bar", "9.7.13.1", "named barrier: sync, arrive, red; for whole warps",
     [](Decoder& d) { decode_barrier(d, true); }},
    {"barrier", "9.7.13.1", "named barrier, also of single lanes", [](Decoder& d) { decode_barrier(d, false); }},
    {"barrier.cluster", "9.7.13.3", "barrier of a cluster: arrive, wait", decode_cluster},
    {"mbarrier.init", "9.7.13.15.9", "makes an mbarrier",
     [](Decoder& d) {
         take_shared(d), d.take("b64"), decode_address(d, 0);
         d.op.b = d.source(1, 4);
         d.op.fn = &mbarrier_init;
     }},
    {"mbarrier.inval", "9.7.13.15.10", "unmakes it",
     [](Decoder& d) {
         take_shared(d), d.take("b64"), decode_address(d, 0);
         d.op.fn = &mbarrier_inval;
     }},
    {"mbarrier.arrive", "9.7.13.15.13", "arrives, after adding expected bytes with .expect_tx", decode_arrive},
    {"mbarrier.expect_tx", "9.7.13.15.11", "adds expected bytes", decode_tx<true>},
    {"mbarrier.complete_tx", "9.7.13.15.12", "takes bytes off as a copy would", decode_tx<false>},
    {"mbarrier.test_wait", "9.7.13.15.16", "asks whether a phase is complete", decode_wait<false>},
    {"mbarrier.try_wait", "9.7.13.15.16", "waits for a phase; gives up only when nothing else moves",
     decode_wait<true>},
    {"setmaxnreg", "9.7.19.5", "moves registers between warps; waits while the pool is empty", decode_setmaxnreg},
};

}  // namespace moksim
