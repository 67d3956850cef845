// The scheduler: which warp runs next, when asynchronous work happens, and what to do when nothing moves.
#include "machine.h"

#include <cxxabi.h>

#include <chrono>
#include <cstdarg>
#include <set>

#include "isa.h"

namespace moksim {

constexpr int kErrorLaunchFailure = 719;  // cudaErrorLaunchFailure
constexpr uint64_t kStallSteps = 200'000;
constexpr uint64_t kFirstJumpNs = 1'000'000;
constexpr uint64_t kDeadlockNs = 1'000'000'000;  // virtual time without progress that is reported
constexpr int kFreeTries = 600;                  // more than the kernels make between two looks at the clock

std::string format(const char* pattern, ...) {
    va_list args;
    va_start(args, pattern);
    char buffer[2048];
    vsnprintf(buffer, sizeof buffer, pattern, args);
    va_end(args);
    return buffer;
}

static std::string demangled(const std::string& name) {
    int status = 0;
    char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    std::string result = status == 0 ? text : name;
    free(text);
    return result.substr(0, result.find('('));
}

std::string name_of(const Warp& w) {
    const Cta& cta = *w.cta;
    return format("rank %d CTA (%u,%u,%u) warp %d", cta.launch->rank, cta.id[0], cta.id[1], cta.id[2], w.index);
}

Machine& Machine::get() {
    static auto* machine = new Machine;  // never destroyed: the device thread outlives main
    return *machine;
}

// Host side

// Takes the machine's lock from a host thread; the device thread gives way between rounds.
struct HostLock {
    explicit HostLock(Machine& m) : machine(m) {
        ++machine.host_waiting;
        lock = std::unique_lock(machine.mutex);
        --machine.host_waiting;
    }
    Machine& machine;
    std::unique_lock<std::mutex> lock;
};

LoadedModule* Machine::load(const std::string& ptx) {
    auto loaded = std::make_unique<LoadedModule>();
    loaded->module = parse_ptx(ptx);
    HostLock guard(*this);
    load_module_variables(*loaded, memory);
    modules.push_back(std::move(loaded));
    return modules.back().get();
}

const Program* Machine::program(LoadedModule* module, const std::string& kernel) {
    HostLock guard(*this);
    auto& slot = module->programs[kernel];
    if (!slot) slot = lower(*module, kernel, sources);
    return slot.get();
}

std::shared_ptr<Launch> Machine::launch(LoadedModule* module, const LaunchRequest& request) {
    const Program* p = program(module, request.kernel);
    auto l = std::make_shared<Launch>();
    l->program = p;
    l->param_storage.resize(p->param_bytes + 256);
    l->params = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(l->param_storage.data()) + 127) / 128 * 128);
    for (size_t i = 0; i < p->params.size(); ++i)
        memcpy(l->params + p->params[i].first, request.args[i], p->params[i].second);
    l->num_clusters = 1;
    for (int i = 0; i < 3; ++i) {
        l->grid[i] = request.grid[i], l->block[i] = request.block[i];
        l->cluster[i] = p->function->cluster[0] ? p->function->cluster[i] : request.cluster[i];
        if (!l->grid[i] || !l->block[i] || !l->cluster[i] || l->grid[i] % l->cluster[i])
            throw PtxError("invalid launch shape of " + request.kernel);
        l->num_clusters *= l->grid[i] / l->cluster[i];
    }
    const uint32_t threads = l->block[0] * l->block[1] * l->block[2];
    if (threads > 1024 || (p->function->max_threads && threads > static_cast<uint32_t>(p->function->max_threads)))
        throw PtxError(format("%s: %u threads a block are more than its launch bounds", p->name.c_str(), threads));
    l->dynamic_shared = request.dynamic_shared;
    if (p->shared_static + l->dynamic_shared + kSharedReserved > kSharedMax)
        throw PtxError(format("%s: %u bytes of shared memory", p->name.c_str(), p->shared_static + l->dynamic_shared));
    l->rank = request.rank;
    l->queue = request.queue;
    HostLock guard(*this);
    l->number = ++num_launches;
    launches.push_back(l);
    if (!is_thread_started) {
        is_thread_started = true;
        thread = std::thread([this] { device_loop(); });
        thread.detach();
    }
    work.notify_all();
    if (config.is_blocking) done.wait(guard.lock, [&] { return l->is_done; });
    return l;
}

int Machine::synchronize(uint64_t queue, bool all) {
    HostLock guard(*this);
    done.wait(guard.lock, [&] {
        for (auto& l : launches)
            if (all || l->queue == queue) return false;
        return true;
    });
    const int error = pending_error;
    pending_error = 0;
    return error;
}

// Reports

std::string Machine::source(uint32_t op) const {
    return op < sources.size() ? sources[op].text : "?";
}

void Machine::report(const char* kind, const std::string& text, uint64_t key) {
    const uint64_t full_key = key * 1099511628211ull ^ std::hash<std::string>()(kind);
    if (report_keys[full_key]++ || reports.size() >= config.max_reports) return;
    reports.push_back({kind, text});
    if (!pending_error) pending_error = kErrorLaunchFailure;
    if (running && !running->error) running->error = kErrorLaunchFailure;
}

void Machine::fatal(const char* kind, const std::string& text, const Warp* warp, const Op* op) {
    std::string full = text;
    if (op) full += "\n  at " + source(op->id);
    if (warp) full += "\n  by " + name_of(*warp) + " of " + demangled(warp->program->name);
    report(kind, full, op ? op->id : 0);
    throw Abort{};
}

static const char* wait_name(WaitKind kind) {
    static const char* names[] = {"",      "mbarrier", "named barrier", "cluster barrier",    "bulk copies",
                                  "wgmma", "cp.async", "registers",     "sleeping or polling"};
    return names[static_cast<int>(kind)];
}

static std::string describe_wait(const Warp& w) {
    Cta& cta = *w.cta;
    const uint32_t offset = w.wait.address & kSharedOffsetMask;
    if (w.wait.kind == WaitKind::kMbarrier && cta.mbarriers.count(offset)) {
        const Mbarrier& b = cta.mbarriers[offset];
        return format("mbarrier shared+%u: awaited parity %u, %u phases complete, %u of %u arrivals missing, tx %ld",
                      offset, w.wait.parity, b.phase, b.pending, b.expected, static_cast<long>(b.tx));
    }
    if (w.wait.kind == WaitKind::kBarrier) {
        const NamedBarrier& b = cta.barriers[w.wait.address];
        return format("named barrier %u: %u of %u threads", w.wait.address, b.arrived, b.expected);
    }
    if (w.wait.kind == WaitKind::kCluster)
        return format("cluster barrier: %u of %u threads", cta.cluster->arrived, cta.cluster->expected);
    return wait_name(w.wait.kind);
}

std::string Machine::table() {
    std::string text;
    for (auto& l : launches)
        for (auto& cluster : l->clusters)
            for (auto& cta : cluster->ctas)
                for (auto& w : cta->warps) {
                    if (w->is_done) continue;
                    std::vector<Group> groups = w->others;
                    if (w->mask) groups.push_back({w->pc, w->mask, Group::kReady, 0, 0, {}});
                    for (auto& g : groups) {
                        static const char* states[] = {"runs", "waits", "waits to converge", "waits in __syncwarp"};
                        const std::string what = g.state == Group::kBlocked ? describe_wait(*w) : "";
                        text += format("  %-28s lanes %08x %-18s %s | %s\n", name_of(*w).c_str(), g.mask,
                                       w->wake_step && g.state == Group::kReady ? "polls" : states[g.state],
                                       what.c_str(), source(l->program->ops[g.pc].id).c_str());
                    }
                }
    return text;
}

// Launches, clusters, CTAs and warps

Entity Machine::new_entity(const std::string& name) {
    if (entity_names.size() >= 65535) throw PtxError("too many warps and barriers at once");
    entity_names.push_back(name);
    entity_times.push_back(0);
    return static_cast<Entity>(entity_names.size() - 1);
}

void Machine::start_launches() {
    std::set<uint64_t> busy;
    for (auto& l : launches) {
        if (!busy.insert(l->queue).second || l->is_started) continue;
        l->is_started = true;
        l->initial = retired;
        const uint32_t size = l->cluster[0] * l->cluster[1] * l->cluster[2];
        l->slots.resize(std::max<uint32_t>(config.num_sms * config.max_ctas_per_sm, size));
        memory.add(reinterpret_cast<Addr>(l->params), l->program->param_bytes + 64, "kernel parameters", true);
        progress();
    }
    for (auto& l : launches)
        if (l->is_started) {
            const uint32_t size = l->cluster[0] * l->cluster[1] * l->cluster[2];
            while (l->next_cluster < l->num_clusters && (l->live_clusters + 1) * size <= l->slots.size())
                start_cluster(*l);
        }
}

static void start_warp(Machine& m, Cta& cta, int index, uint32_t threads, const std::vector<Entity>& entities) {
    const Program& p = *cta.launch->program;
    auto w = std::make_unique<Warp>();
    w->cta = &cta;
    w->program = &p;
    w->index = index;
    w->storage.resize(p.register_bytes + 64);
    w->bases[0] = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(w->storage.data()) + 63) / 64 * 64);
    w->bases[1] = p.constant_base;
    w->predicates.resize(p.num_predicates);
    w->local.resize(static_cast<size_t>(p.local_bytes) * kLanes);
    w->register_mma.resize(p.register_bytes / 128 + 1);
    const uint32_t first = index * kLanes;
    w->live = threads - first >= kLanes ? kAllLanes : (1u << (threads - first)) - 1;
    w->mask = w->live;
    w->pc = p.entries.at(p.name);
    w->random.seed(static_cast<uint32_t>(m.random()));
    w->entity = entities[0], w->cp_entity = entities[1];
    w->bulk_read_entity = entities[2], w->bulk_write_entity = entities[3];
    w->clock = m.entity_times[w->entity] + 1;
    w->cp_sequence = w->cp_waited = m.entity_times[w->cp_entity];
    w->bulk_sequence = std::max(m.entity_times[w->bulk_read_entity], m.entity_times[w->bulk_write_entity]);
    w->order = cta.launch->initial;
    w->order.seen.raise(w->entity, w->clock);
    w->at_fence = w->order;
    const Launch& l = *cta.launch;
    for (auto& special : p.specials) {
        auto* lanes = w->at<uint32_t>(special.ref);
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
            const uint32_t t = first + lane;
            const uint32_t tid[3] = {t % l.block[0], t / l.block[0] % l.block[1], t / l.block[0] / l.block[1]};
            uint32_t cluster_id[3], in_cluster[3];
            for (int i = 0; i < 3; ++i)
                cluster_id[i] = cta.id[i] / l.cluster[i], in_cluster[i] = cta.id[i] % l.cluster[i];
            const uint32_t base = cta.rank << kSharedRankShift;
            const uint32_t align = p.dynamic_align;
            const uint32_t total = p.shared_static + l.dynamic_shared;
            const uint32_t dynamic = base + (kSharedReserved + p.shared_static + align - 1) / align * align;
            const uint32_t num_warps = (threads + kLanes - 1) / kLanes;
            const uint32_t size = l.cluster[0] * l.cluster[1] * l.cluster[2];
            const uint32_t values[] = {base,
                                       dynamic,
                                       lane,
                                       static_cast<uint32_t>(index),
                                       num_warps,
                                       tid[0],
                                       tid[1],
                                       tid[2],
                                       l.block[0],
                                       l.block[1],
                                       l.block[2],
                                       cta.id[0],
                                       cta.id[1],
                                       cta.id[2],
                                       l.grid[0],
                                       l.grid[1],
                                       l.grid[2],
                                       static_cast<uint32_t>(cta.slot % m.config.num_sms),
                                       static_cast<uint32_t>(m.config.num_sms),
                                       1u << lane,
                                       (2u << lane) - 1,
                                       (1u << lane) - 1,
                                       ~((1u << lane) - 1),
                                       ~((2u << lane) - 1),
                                       in_cluster[0],
                                       in_cluster[1],
                                       in_cluster[2],
                                       l.cluster[0],
                                       l.cluster[1],
                                       l.cluster[2],
                                       cta.rank,
                                       size,
                                       cluster_id[0],
                                       cluster_id[1],
                                       cluster_id[2],
                                       l.grid[0] / l.cluster[0],
                                       l.grid[1] / l.cluster[1],
                                       l.grid[2] / l.cluster[2],
                                       l.dynamic_shared,
                                       total};
            static_assert(sizeof values / sizeof *values == 40);
            lanes[lane] = values[special.id];
        }
    }
    cta.warps.push_back(std::move(w));
    m.wake(cta.warps.back().get());
}

static void start_cta(Machine& m, Cluster& cluster, uint32_t rank, const uint32_t* id) {
    Launch& l = *cluster.launch;
    auto owned = std::make_unique<Cta>();
    Cta& cta = *owned;
    cluster.ctas.push_back(std::move(owned));
    cta.launch = &l;
    cta.cluster = &cluster;
    cta.rank = rank;
    for (int i = 0; i < 3; ++i) cta.id[i] = id[i];
    cta.index = (id[2] * l.grid[1] + id[1]) * l.grid[0] + id[0];
    while (!l.slots[cta.slot].is_free) ++cta.slot;
    Launch::Slot& slot = l.slots[cta.slot];
    slot.is_free = false;
    const Program& p = *l.program;
    const uint32_t threads = l.block[0] * l.block[1] * l.block[2];
    const int num_warps = (threads + kLanes - 1) / kLanes;
    if (slot.entities.empty()) {
        const std::string where = format("rank %d slot %d ", l.rank, cta.slot);
        for (int i = 0; i < num_warps; ++i)
            for (const char* what : {"", " cp.async", " bulk copy (reads)", " bulk copy (writes)", " wgmma"})
                slot.entities.push_back(m.new_entity(where + "warp " + std::to_string(i) + what));
    }
    const uint32_t align = p.dynamic_align;
    const uint32_t end = (kSharedReserved + p.shared_static + align - 1) / align * align + l.dynamic_shared;
    cta.shared.assign(end, 0xff);  // NaN in every float format
    cta.shared_region.size = end;
    cta.shared_region.host = cta.shared.data();
    cta.shared_region.name = "shared memory";
    cta.shared_region.is_initialized = false;
    cta.warpgroups.resize((num_warps + 3) / 4);
    for (size_t i = 0; i < cta.warpgroups.size(); ++i) {
        cta.warpgroups[i].entity = slot.entities[i * 4 * 5 + 4];
        cta.warpgroups[i].clock_base = m.entity_times[cta.warpgroups[i].entity];
    }
    cta.live_warps = num_warps;
    const int bounded = p.function->max_threads;
    int registers = p.function->max_registers;
    if (!registers && bounded && p.function->min_ctas)
        registers = std::min(255, 65536 / (p.function->min_ctas * bounded) / 8 * 8);
    cta.free_registers = registers ? 0 : -1;
    for (int i = 0; i < num_warps; ++i) {
        start_warp(m, cta, i, threads, {slot.entities.begin() + i * 5, slot.entities.begin() + i * 5 + 5});
        cta.warps.back()->registers = registers;
    }
}

void Machine::start_cluster(Launch& l) {
    auto cluster = std::make_shared<Cluster>();
    cluster->launch = &l;
    const uint32_t nx = l.grid[0] / l.cluster[0], ny = l.grid[1] / l.cluster[1];
    const uint32_t n = l.next_cluster++;
    const uint32_t origin[3] = {n % nx * l.cluster[0], n / nx % ny * l.cluster[1], n / nx / ny * l.cluster[2]};
    const uint32_t size = l.cluster[0] * l.cluster[1] * l.cluster[2];
    cluster->live_ctas = static_cast<int>(size);
    for (uint32_t rank = 0; rank < size; ++rank) {
        const uint32_t id[3] = {origin[0] + rank % l.cluster[0], origin[1] + rank / l.cluster[0] % l.cluster[1],
                                origin[2] + rank / l.cluster[0] / l.cluster[1]};
        start_cta(*this, *cluster, rank, id);
        cluster->expected += l.block[0] * l.block[1] * l.block[2];
    }
    ++l.live_clusters;
    l.clusters.push_back(std::move(cluster));
    progress();
}

void Machine::end_warp(Warp& w) {
    w.is_done = true;
    progress();
    entity_times[w.entity] = w.clock;
    entity_times[w.cp_entity] = w.cp_sequence;
    entity_times[w.bulk_read_entity] = entity_times[w.bulk_write_entity] = w.bulk_sequence;
    if (config.checks & kCheckLeak) {
        for (auto& op : w.bulk_ops)
            if (!op->is_read_waited)
                report("leak",
                       "bulk copy from shared memory not waited for (cp.async.bulk.wait_group.read) at exit of " +
                           name_of(w),
                       w.index);
        if (!w.cp_ops.empty()) report("leak", "cp.async not waited for at exit of " + name_of(w), w.index);
    }
    if (--w.cta->live_warps == 0) end_cta(*w.cta);
}

void Machine::end_cta(Cta& cta) {
    cta.has_exited = true;
    if (config.checks & kCheckLeak) {
        if (cta.async_in_flight)
            report("leak",
                   format("%d asynchronous copies into or out of shared memory in flight at exit of CTA %u",
                          cta.async_in_flight, cta.index),
                   1);
        for (auto& [offset, b] : cta.mbarriers)
            if (b.copied > b.observed)
                report("leak",
                       format("copies that complete on mbarrier shared+%u of CTA %u were not waited for at its exit",
                              offset, cta.index),
                       3);
        for (auto& group : cta.warpgroups)
            if (!group.pending.empty()) report("leak", format("wgmma in flight at exit of CTA %u", cta.index), 2);
    }
    for (auto& [offset, b] : cta.mbarriers)
        entity_times[b.entity] = std::max(entity_times[b.entity], b.clock_base + b.phase + 1);
    for (auto& group : cta.warpgroups)
        entity_times[group.entity] = group.clock_base + static_cast<uint32_t>(group.first);
    Launch& l = *cta.launch;
    Cluster* cluster = cta.cluster;
    if (--cluster->live_ctas) return;
    for (auto& c : cluster->ctas) {
        l.slots[c->slot].is_free = true;
        if (c->async_in_flight) throw Abort{};  // would touch freed memory; already reported
    }
    --l.live_clusters;
}

// Everything that a launch did happens before what is launched after its end.
void Machine::retire(Launch& l) {
    for (auto& slot : l.slots) {
        for (Entity e : slot.entities) retired.seen.raise(e, ~0u), retired.fenced.raise(e, ~0u);
        for (auto& [offset, e] : slot.mbarriers) retired.seen.raise(e, ~0u), retired.fenced.raise(e, ~0u);
    }
}

void Machine::finish(Launch& l) {
    for (size_t i = 0; i < tasks.size() && !l.error; ++i) {  // copies out of shared memory that nobody waited for
        if (tasks[i].launch != &l || tasks[i].needs_cluster) continue;
        tasks[i].launch = nullptr;
        const auto run_it = std::move(tasks[i].run);
        run_it();  // may add to the tasks
    }
    l.is_done = true;
    std::erase_if(tasks, [&](AsyncTask& t) { return t.launch == &l || !t.launch; });
    auto is_mine = [&](Warp* w) { return w->cta->launch == &l; };
    std::erase_if(ready, is_mine);
    std::erase_if(asleep, is_mine);
    retire(l);
    l.clusters.clear();
    if (l.is_started) memory.remove(reinterpret_cast<Addr>(l.params));
    std::erase_if(launches, [&](auto& other) { return other.get() == &l; });
    reset_when_idle();
    progress();
    done.notify_all();
}

// With nothing running, whatever was done is ordered before whatever comes: forget it.
void Machine::reset_when_idle() {
    for (auto& l : launches)
        if (l->is_started) return;
    ++generation;
    entity_names.clear();
    entity_times.clear();
    retired.clear();
    memory.sync_variables.clear();
}

void Machine::abort(Launch& l) {
    if (!l.error) l.error = kErrorLaunchFailure;
    finish(l);
}

// Scheduling

void Machine::wake(Warp* w) {
    for (auto& g : w->others)
        if (g.state == Group::kBlocked) g.state = Group::kReady;
    w->is_blocked = false;
    if (w->wake_step) {
        w->wake_step = 0;
        std::erase(asleep, w);
    }
    if (!w->is_queued && !w->is_done) {
        w->is_queued = true;
        ready.push_back(w);
    }
}

void Machine::wake(std::vector<Warp*>& waiters) {
    for (Warp* w : waiters) wake(w);
    waiters.clear();
}

void Machine::sleep(Warp& w, uint64_t steps) {
    w.wake_step = step + steps;
}

void Machine::wake_sleepers(bool all) {
    uint64_t first = ~0ull;
    for (Warp* w : asleep) first = std::min(first, w->wake_step);
    if (all && first > step) step = std::max(step, first);
    for (size_t i = 0; i < asleep.size();) {
        Warp* w = asleep[i];
        if (w->wake_step <= step) {
            w->wake_step = 0;
            asleep[i] = asleep.back();
            asleep.pop_back();
            w->is_queued = true;
            ready.push_back(w);
        } else {
            ++i;
        }
    }
}

static void update_other_pc(Warp& w) {
    w.other_pc = ~0u;
    for (auto& g : w.others)
        if (g.state == Group::kReady) w.other_pc = std::min(w.other_pc, g.pc);
}

static void park(Warp& w, Group::State state) {
    if (w.mask) w.others.push_back({w.pc, w.mask, state, w.barrier_mask, w.ticket, std::move(w.returns)});
    w.mask = 0;
    w.ticket = 0;
    w.returns.clear();
}

static void merge_groups(Warp& w) {
    for (size_t i = 0; i < w.others.size(); ++i)
        for (size_t k = i + 1; k < w.others.size();) {
            Group &g = w.others[i], &h = w.others[k];
            const bool can_merge = g.pc == h.pc && !g.ticket && !h.ticket && g.state != Group::kWarpBarrier &&
                                   h.state != Group::kWarpBarrier && g.returns == h.returns;
            if (!can_merge) {
                ++k;
                continue;
            }
            if (g.state != h.state) g.state = Group::kReady;
            g.mask |= h.mask;
            w.others.erase(w.others.begin() + static_cast<long>(k));
        }
    for (auto& g : w.others) {
        if (g.state == Group::kConverging && !(g.barrier_mask & w.live & ~g.mask)) g.state = Group::kReady;
        if (g.state != Group::kWarpBarrier) continue;
        uint32_t arrived = 0;
        for (auto& h : w.others)
            if (h.state == Group::kWarpBarrier && h.barrier_mask == g.barrier_mask) arrived |= h.mask;
        if (g.barrier_mask & w.live & ~arrived) continue;
        const uint32_t members = g.barrier_mask;
        for (auto& h : w.others)
            if (h.state == Group::kWarpBarrier && h.barrier_mask == members) h.state = Group::kReady, ++h.pc;
    }
}

// Lanes at the lowest pc run first, so that they meet the others where their paths join; a group that loops while
// others wait lets a random other go for a while (forward progress of diverged threads, PTX ISA 3.2).
static bool choose_group(Warp& w) {
    merge_groups(w);
    std::vector<size_t> candidates;
    size_t best = 0;
    for (size_t i = 0; i < w.others.size(); ++i)
        if (w.others[i].state == Group::kReady) {
            if (candidates.empty() || w.others[i].pc < w.others[best].pc) best = i;
            candidates.push_back(i);
        }
    if (candidates.empty()) return false;
    if (w.backward_branches > 32) {
        best = candidates[w.random() % candidates.size()];
        w.backward_branches = 0;
        w.hold = 128;
    }
    Group g = std::move(w.others[best]);
    w.others.erase(w.others.begin() + static_cast<long>(best));
    w.pc = g.pc, w.mask = g.mask, w.ticket = g.ticket;
    w.returns = std::move(g.returns);
    update_other_pc(w);
    return true;
}

Status branch(Warp& w, uint32_t taken, uint32_t target) {
    if (target <= w.pc) ++w.backward_branches;
    if (taken != w.mask) {
        w.others.push_back({w.pc + 1, w.mask & ~taken, Group::kReady, 0, 0, w.returns});
        w.mask = taken;
        update_other_pc(w);
    }
    w.pc = target;
    return Status::kJump;
}

// An instruction other than wgmma touches a register that a wgmma in flight will write (9.7.15.5).
static void check_mma_registers(Machine& m, Warp& w, const Op& op) {
    for (uint32_t i = 0; i < op.num_refs; ++i) {
        const Ref ref = w.program->refs[op.refs + i];
        if (w.register_mma[ref / 128] > w.mma_waited)
            m.report("wgmma",
                     "register of a wgmma in flight used before wgmma.wait_group\n  at " + m.source(op.id) + "\n  by " +
                         name_of(w),
                     op.id);
    }
}

void Machine::run(Warp& w, int steps) {
    const Op* ops = w.program->ops.data();
    if (!w.mask && !choose_group(w)) {
        w.is_blocked = true;
        return;
    }
    while (steps-- > 0) {
        if (w.hold > 0) {
            --w.hold;
        } else if (w.pc >= w.other_pc || (w.backward_branches > 32 && !w.others.empty())) {
            park(w, Group::kReady);
            choose_group(w);
        }
        const Op& op = ops[w.pc];
        uint32_t mask = w.mask;
        ++step;
        if (op.guard) {
            mask &= w.predicate(op.guard, op.guard_negated);
            if (!mask) {
                ++w.pc;
                continue;
            }
        }
        thread_instructions += __builtin_popcount(mask);
        Status status;
        if ((op.flags & kConverged) && (w.live & ~w.mask)) {
            w.barrier_mask = kAllLanes;
            status = Status::kConverge;
        } else {
            if (w.mma_issued != w.mma_waited && !(op.flags & kMmaSafe) && (config.checks & kCheckMma))
                check_mma_registers(*this, w, op);
            status = op.fn(w, op, mask);
        }
        switch (status) {
            case Status::kNext:
                ++w.pc;
                continue;
            case Status::kJump:
                if (w.mask) continue;
                break;
            case Status::kYield:
                ++w.pc;
                return;
            case Status::kBlock:
                park(w, Group::kBlocked);
                break;
            case Status::kConverge:
                park(w, Group::kConverging);
                break;
            case Status::kWarpBarrier:
                park(w, Group::kWarpBarrier);
                break;
        }
        if (!w.live) return end_warp(w);
        if (!choose_group(w)) {
            w.is_blocked = true;
            return;
        }
    }
}

void Machine::add_async(Cta& cta, std::function<void()> run) {
    tasks.push_back({cta.launch, cta.cluster->weak_from_this(), true, std::move(run)});
}

void Machine::run_task() {
    const size_t i = random() % tasks.size();
    AsyncTask task = std::move(tasks[i]);
    tasks[i] = std::move(tasks.back());
    tasks.pop_back();
    if (task.needs_cluster && task.cluster.expired()) return;
    running = task.launch;
    progress();
    try {
        task.run();
    } catch (Abort&) {
        abort(*running);
    }
    running = nullptr;
}

void Machine::round(std::unique_lock<std::mutex>& lock) {
    if (!asleep.empty()) wake_sleepers(ready.empty() && tasks.empty());
    const double draw = static_cast<double>(random() >> 11) * 0x1p-53;
    if (!tasks.empty() && (ready.empty() || draw < async_rate)) return run_task();
    if (ready.empty() || step - last_progress > kStallSteps) return stall(lock);
    const size_t i = random() % ready.size();
    Warp& w = *ready[i];
    Launch& l = *w.cta->launch;
    running = &l;
    try {
        run(w, 1 + static_cast<int>(random() % quantum));
        if (w.is_done || w.is_blocked || w.wake_step) {
            w.is_queued = false;
            std::erase(ready, &w);
            if (w.wake_step && !w.is_done) asleep.push_back(&w);
        }
        if (w.is_done && !w.cta->cluster->live_ctas) {
            std::erase_if(l.clusters, [](auto& c) { return !c->live_ctas; });
            if (l.next_cluster == l.num_clusters && !l.live_clusters) finish(l);
            start_launches();
        }
    } catch (Abort&) {
        abort(l);
    } catch (PtxError& error) {
        report("error", error.what(), 0);
        abort(l);
    }
    running = nullptr;
}

// Nothing moves. Virtual time jumps, so that time limits in the kernels end their waits; without them it is a deadlock.
void Machine::stall(std::unique_lock<std::mutex>& lock) {
    std::set<int> ranks;
    for (auto& l : launches)
        if (l->is_started) ranks.insert(l->rank);
    if (stall_ns == 0 && static_cast<int>(ranks.size()) < config.num_ranks) {
        const uint64_t before = num_launches;
        done.notify_all();
        work.wait_for(lock, std::chrono::milliseconds(config.grace_ms), [&] { return num_launches != before; });
        start_launches();
        if (num_launches != before) return progress();
    }
    const uint64_t jump = std::max(kFirstJumpNs, stall_ns);
    skipped_ns += jump;
    stall_ns += jump;
    last_progress = step;
    if (stall_ns > kDeadlockNs) report("deadlock", "nothing moves:\n" + table(), 0);
    if (stall_ns > config.deadlock_ns) {
        const auto all = launches;
        for (auto& l : all)
            if (l->is_started) abort(*l);
        start_launches();
        return;
    }
    for (auto& l : launches)
        for (auto& cluster : l->clusters)
            for (auto& cta : cluster->ctas)
                for (auto& w : cta->warps)
                    if (!w->is_done && w->wait.kind == WaitKind::kMbarrier && w->is_blocked) {
                        w->free_tries = kFreeTries;
                        wake(w.get());
                    }
}

void Machine::device_loop() {
    std::unique_lock lock(mutex);
    while (true) {
        if (launches.empty()) {
            work.wait(lock, [&] { return !launches.empty(); });
            random.seed(config.seed * 0x9e3779b97f4a7c15ull + 1);
            const double rates[] = {0.5, 0.02, 0.1, 0.9};
            const int quanta[] = {64, 256, 16, 1024};
            async_rate = config.async_rate >= 0 ? config.async_rate : rates[config.seed % 4];
            quantum = quanta[config.seed / 2 % 4];
        }
        start_launches();
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < 256 && !launches.empty() && !host_waiting.load(std::memory_order_relaxed); ++i) round(lock);
        busy_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        while (host_waiting.load()) {
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
        }
    }
}

}  // namespace moksim
