// The machine: decoded programs, warps, CTAs, clusters, launches, and the scheduler that interleaves them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "order.h"
#include "ptx.h"

namespace moksim {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

struct Op;
struct Warp;
struct Cta;
struct Cluster;
struct Launch;
struct Machine;

enum class Status : uint8_t {
    kNext,         // go on with the next instruction
    kJump,         // the handler has set the pc (and perhaps split the warp)
    kBlock,        // execute again when something has changed
    kYield,        // go on, but let others run first
    kConverge,     // execute again when the lanes in Warp::barrier_mask are here too
    kWarpBarrier,  // go on when the lanes in Warp::barrier_mask have all come to a bar.warp.sync
};
using Handler = Status (*)(Warp&, const Op&, uint32_t mask);

// Where an operand's 32 lanes lie: an offset into the warp's registers, or (bit 0 set) into the program's constants.
using Ref = uint32_t;
constexpr Ref kNoRef = ~0u;

enum OpFlags : uint8_t {
    kConverged = 1,  // .aligned: waits until all live lanes of the warp are here
    kMmaSafe = 2,    // may touch registers of wgmmas in flight
};

struct Op {
    Handler fn = nullptr;
    Ref d = kNoRef, a = kNoRef, b = kNoRef, c = kNoRef;
    uint16_t guard = 0, pd = 0, pq = 0, ps = 0;  // predicates; 0 is none
    bool guard_negated = false, ps_negated = false;
    uint8_t flags = 0;
    uint32_t x = 0, y = 0;            // what the modifiers say, as the handler wants it
    uint64_t imm = 0;                 // immediate or address offset
    uint32_t ext = 0, num_ext = 0;    // further operands: Program::ext[ext ..]
    uint32_t target = 0;              // branch target
    uint32_t refs = 0, num_refs = 0;  // every register operand: Program::refs[refs ..]
    uint32_t id = 0;                  // index into Machine::sources
};

// An entry function and all that it calls, ready to run.
struct Program {
    const Function* function = nullptr;
    std::string name;
    std::vector<Op> ops;
    std::vector<Ref> ext, refs;
    std::vector<uint64_t> constants;  // 32 lanes each; 64-byte aligned by over-allocation
    uint8_t* constant_base = nullptr;
    std::vector<uint32_t> jump_tables;
    uint32_t register_bytes = 0, num_predicates = 1;
    uint32_t dynamic_align = 16;  // of dynamic shared memory
    uint32_t local_bytes = 0;
    uint32_t shared_static = 0;  // bytes of static shared memory, from kSharedReserved
    uint32_t param_bytes = 0;
    std::vector<std::pair<uint32_t, uint32_t>> params;  // offset, size
    struct Special {
        int id;
        Ref ref;
    };
    std::vector<Special> specials;
    std::unordered_map<std::string, uint32_t> entries;  // function name -> pc
};

// A set of lanes of one warp at one place.
struct Group {
    uint32_t pc = 0, mask = 0;
    enum State : uint8_t { kReady, kBlocked, kConverging, kWarpBarrier } state = kReady;
    uint32_t barrier_mask = 0;      // kConverging, kWarpBarrier: lanes awaited
    uint64_t ticket = 0;            // a blocking instruction's note that it has arrived
    std::vector<uint32_t> returns;  // call stack
};

enum class WaitKind : uint8_t { kNone, kMbarrier, kBarrier, kCluster, kBulk, kMma, kCpAsync, kRegisters, kSleep };

struct Wait {  // for the deadlock table
    WaitKind kind = WaitKind::kNone;
    uint32_t address = 0;  // shared address or barrier number
    uint32_t parity = 0;
};

struct CpAsyncOp {
    uint32_t sequence = 0, mask = 0;
    uint32_t group[kLanes];
    std::function<void()> run;  // empty once it has run
};

struct BulkOp {  // a bulk copy out of shared memory, which completes through its thread's bulk groups
    uint32_t sequence = 0, group = 0;
    int lane = 0;
    bool has_read = false, has_written = false, is_read_waited = false;
    std::function<void()> read, write;
};

struct Warp {
    Cta* cta = nullptr;
    const Program* program = nullptr;
    int index = 0;  // in the CTA
    uint8_t* bases[2];
    std::vector<uint8_t> storage;
    std::vector<uint32_t> predicates;
    std::vector<uint8_t> local;
    uint32_t live = 0;

    // The group that runs; the others wait in `others`.
    uint32_t pc = 0, mask = 0, other_pc = ~0u;  // other_pc: lowest pc of the others
    uint64_t ticket = 0, cluster_ticket = 0;
    std::vector<uint32_t> returns;
    std::vector<Group> others;
    uint32_t barrier_mask = 0;
    bool is_blocked = false;
    uint32_t backward_branches = 0;
    uint32_t hold = 0;  // instructions that the group may still run before another one's turn

    bool is_done = false, is_queued = false;
    int free_tries = 0;      // so many try_waits give up at once, because nothing else moves
    uint64_t wake_step = 0;  // asleep until then if not 0
    Wait wait;

    Entity entity = 0, cp_entity = 0, bulk_read_entity = 0, bulk_write_entity = 0;
    uint32_t clock = 1;
    Order order;     // what this warp has seen
    Order at_fence;  // as of the last release fence
    int fence_scope = 0;
    bool has_fence = false;
    Order observed;  // seen by relaxed reads, not yet ordered by an acquire fence

    // cp.async (per lane groups) and bulk groups.
    std::deque<CpAsyncOp> cp_ops;
    uint32_t cp_sequence = 0, cp_waited = 0, cp_group[kLanes] = {};
    std::deque<std::shared_ptr<BulkOp>> bulk_ops;
    uint32_t bulk_sequence = 0, bulk_group[kLanes] = {};

    // wgmma: numbers of operations issued, committed (per group) and waited for.
    uint64_t mma_issued = 0, mma_waited = 0;
    std::deque<uint64_t> mma_groups;     // mma_issued at each commit that is not yet waited for
    std::vector<uint64_t> register_mma;  // per 128-byte slot: last operation that writes it, plus one
    bool has_mma_fence = false;

    int registers = 0;  // setmaxnreg's current count
    uint32_t poll_pc = 0, polls = 0;
    uint64_t poll_value = 0;
    std::mt19937 random;

    template <class T>
    T* at(Ref ref) const {
        return reinterpret_cast<T*>(bases[ref & 1] + (ref & ~1u));
    }
    uint32_t predicate(uint16_t p, bool negated) const { return negated ? ~predicates[p] : predicates[p]; }
    void set_predicate(uint16_t p, uint32_t bits, uint32_t mask) {
        if (p) predicates[p] = (predicates[p] & ~mask) | (bits & mask);
    }
    void raise_clock() { ++clock, order.seen.raise(entity, clock), order.fenced.raise(entity, clock - 1); }
    Actor actor(const Op& op) const { return {entity, clock, &order, op.id}; }
};

struct Mbarrier {  // PTX ISA 9.7.13.15
    uint32_t offset = 0;
    uint32_t expected = 0, pending = 0;
    int64_t tx = 0;
    uint32_t phase = 0;                 // completed phases
    uint32_t copied = 0, observed = 0;  // phases up to the last copy's, and up to the last successful wait's
    bool is_fenced = false;
    Entity entity = 0;  // the copies that complete on it
    uint32_t init_clock = 0, clock_base = 0;
    Entity init_entity = 0;
    Order arriving, complete;  // released into the current phase, and by the completed ones
    std::vector<Warp*> waiters;
};

struct NamedBarrier {  // bar.sync and bar.arrive, 9.7.13.1
    uint32_t expected = 0, arrived = 0;
    uint64_t generation = 1;
    Order arriving, complete;
    std::vector<Warp*> waiters;
    uint32_t or_bits = 0, and_bits = 1, count = 0, result_or = 0, result_and = 0, result_count = 0;
};

struct MmaOp {  // one wgmma.mma_async of a warpgroup
    const Op* op = nullptr;
    uint64_t number = 0;
    uint64_t a_descriptor = 0, b_descriptor = 0;
    bool scale_d = true;
    uint32_t issued = 0;  // bit per warp
    Order order;
    std::vector<uint32_t> a_registers;  // [warp][4][lane]
    struct Move {
        int warp;
        Ref to, from;
        uint32_t mask;
    };
    std::vector<Move> moves;  // copies of accumulators in flight, made once this is done
};

struct Warpgroup {
    std::deque<MmaOp> pending;
    uint64_t first = 0;  // number of pending[0]
    Entity entity = 0;
    uint32_t clock_base = 0;
    std::vector<Warp*> waiters;
};

struct Cta {
    Launch* launch = nullptr;
    Cluster* cluster = nullptr;
    uint32_t rank = 0;   // in the cluster
    uint32_t index = 0;  // linear in the grid
    uint32_t id[3] = {0, 0, 0};
    int slot = 0;  // the place on the machine that it occupies
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<Warpgroup> warpgroups;
    std::vector<uint8_t> shared;
    Region shared_region;
    std::unordered_map<uint32_t, Mbarrier> mbarriers;  // by offset
    NamedBarrier barriers[16];
    int free_registers = 0;  // setmaxnreg's pool; -1: not modelled
    std::vector<Warp*> register_waiters;
    int live_warps = 0;
    int async_in_flight = 0;  // copies that touch this CTA's shared memory
    bool has_exited = false;
};

struct Cluster : std::enable_shared_from_this<Cluster> {
    Launch* launch = nullptr;
    std::vector<std::unique_ptr<Cta>> ctas;
    uint32_t arrived = 0, expected = 0;
    uint64_t generation = 1;
    Order arriving, complete;
    std::vector<Warp*> waiters;
    int live_ctas = 0;
};

struct Launch {
    const Program* program = nullptr;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t dynamic_shared = 0;
    std::vector<uint8_t> param_storage;
    uint8_t* params = nullptr;  // in param_storage, aligned as tensor maps need it
    int rank = 0;               // virtual device
    uint64_t queue = 0;         // launches of one queue run in order
    uint64_t number = 0;
    uint32_t next_cluster = 0, num_clusters = 0;
    std::vector<std::shared_ptr<Cluster>> clusters;  // resident
    Order initial;
    bool is_started = false, is_done = false;
    int error = 0;  // cudaError_t
    struct Slot {   // a place for a CTA, and the entities of whoever occupies it
        bool is_free = true;
        std::vector<Entity> entities;
        std::unordered_map<uint32_t, Entity> mbarriers;
    };
    std::vector<Slot> slots;
    int live_clusters = 0;
};

// An asynchronous operation that may happen from now on.
struct AsyncTask {
    Launch* launch = nullptr;
    std::weak_ptr<Cluster> cluster;  // that it needs; if it has ended, the work was done before
    bool needs_cluster = false;
    std::function<void()> run;
};

enum Check : uint32_t {
    kCheckBounds = 1,
    kCheckAlign = 2,
    kCheckInit = 4,
    kCheckRace = 8,
    kCheckProxy = 16,
    kCheckReadOnly = 32,
    kCheckBarrier = 64,
    kCheckMma = 128,
    kCheckLeak = 256,
    kCheckAll = 511,
};

struct Config {
    uint32_t checks = kCheckAll;
    uint64_t seed = 0;
    int num_sms = 4;
    int max_ctas_per_sm = 1;
    double async_rate = -1;  // chance that a scheduling step completes one asynchronous operation; < 0: by seed
    uint64_t deadlock_ns = 1ull << 40;  // virtual time without progress after which a launch is ended
    int num_ranks = 1;                  // launches of so many ranks are awaited before virtual time jumps
    uint64_t grace_ms = 5000;           // but for at most this real time
    bool is_blocking = true;            // a launch returns when the kernel has ended
    bool allow_unknown_memory = false;
    uint64_t max_reports = 16;
};

struct Report {
    std::string kind, text;
};

struct Source {
    std::string text;  // "file:line: opcode"
};

struct LaunchRequest {
    std::string kernel;
    uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
    uint32_t dynamic_shared = 0;
    void** args = nullptr;
    uint64_t queue = 0;
    int rank = 0;
};

struct LoadedModule {
    Module module;
    std::unordered_map<std::string, Addr> symbols;
    std::unordered_map<std::string, std::unique_ptr<Program>> programs;
    std::vector<std::unique_ptr<uint8_t[]>> storage;
};

// A launch is over and its error is final, or an instruction cannot go on: thrown inside the machine, never out of it.
struct Abort {};

struct Machine {
    static Machine& get();

    // For the host; each takes the lock.
    LoadedModule* load(const std::string& ptx);
    std::shared_ptr<Launch> launch(LoadedModule* module, const LaunchRequest& request);
    int synchronize(uint64_t queue, bool all);  // waits; returns and clears the first error
    const Program* program(LoadedModule* module, const std::string& kernel);

    // For the device side.
    void report(const char* kind, const std::string& text, uint64_t key);
    [[noreturn]] void fatal(const char* kind, const std::string& text, const Warp* warp, const Op* op);
    void progress() { last_progress = step, stall_ns = 0; }
    void sleep(Warp& warp, uint64_t steps);
    void wake(std::vector<Warp*>& waiters);
    void wake(Warp* warp);
    void add_async(Launch* launch, std::function<void()> run) { tasks.push_back({launch, {}, false, std::move(run)}); }
    void add_async(Cta& cta, std::function<void()> run);
    Entity new_entity(const std::string& name);
    std::string source(uint32_t op) const;
    std::string table();  // what every warp is doing
    uint64_t time_ns() const { return 1'700'000'000'000'000'000ull + step + skipped_ns; }

    std::mutex mutex;
    std::condition_variable work, done;
    std::atomic<int> host_waiting{0};
    Config config;
    Memory memory;
    std::vector<std::unique_ptr<LoadedModule>> modules;
    std::vector<Source> sources;
    std::vector<std::string> entity_names;
    std::vector<uint32_t> entity_times;  // latest clock that each entity has used
    Order retired;                       // everything that launches which have ended did
    std::vector<Report> reports;
    std::unordered_map<uint64_t, int> report_keys;
    std::deque<std::shared_ptr<Launch>> launches;  // not yet done
    int pending_error = 0;
    uint64_t num_launches = 0;
    uint32_t generation = 1;  // of the shadow
    uint64_t step = 0, last_progress = 0, skipped_ns = 0, stall_ns = 0;
    uint64_t thread_instructions = 0;
    double busy_seconds = 0;
    std::mt19937_64 random;
    double async_rate = 0.1;
    int quantum = 32;

    std::vector<Warp*> ready, asleep;
    std::vector<AsyncTask> tasks;

    void device_loop();
    void start_launches();
    void start_cluster(Launch& launch);
    void end_warp(Warp& warp);
    void end_cta(Cta& cta);
    void finish(Launch& launch);
    void abort(Launch& launch);
    void retire(Launch& launch);
    void reset_when_idle();
    void round(std::unique_lock<std::mutex>& lock);
    void run(Warp& warp, int steps);
    void run_task();
    void wake_sleepers(bool all);
    void stall(std::unique_lock<std::mutex>& lock);
    std::thread thread;
    bool is_thread_started = false;
    Launch* running = nullptr;
};

// Splits the running group: `taken` jumps, the rest goes on.
Status branch(Warp& warp, uint32_t taken, uint32_t target);

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string name_of(const Warp& warp);

}  // namespace moksim
