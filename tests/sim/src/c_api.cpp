// The interface that tests/sim/simulator.py calls through ctypes. Functions that can fail return false and keep a text.
#include "isa.h"
#include "runtime.h"

using namespace moksim;

namespace {
thread_local std::string error_text, result_text;

template <class F>
bool guarded(F f) {
    try {
        f();
        return true;
    } catch (const std::exception& e) {
        error_text = e.what();
        return false;
    }
}
}  // namespace

extern "C" {

const char* sim_error() {
    return error_text.c_str();
}

void* sim_load_ptx(const char* text) {
    void* result = nullptr;
    guarded([&] { result = Machine::get().load(text); });
    return result;
}

// Decodes a kernel without running it: finds instructions that the table does not have.
bool sim_decode(void* module, const char* kernel) {
    return guarded([&] { Machine::get().program(static_cast<LoadedModule*>(module), kernel); });
}

const char* sim_kernels(void* module) {
    result_text.clear();
    for (auto& f : static_cast<LoadedModule*>(module)->module.functions)
        if (f->is_entry) result_text += f->name + "\n";
    return result_text.c_str();
}

// shape: grid, block, cluster. Returns when the kernel has ended if launches are blocking. *error: a cudaError_t.
bool sim_launch(void* module, const char* kernel, const uint32_t* shape, uint32_t dynamic_shared, void** args, int rank,
                int* error) {
    return guarded([&] {
        LaunchRequest r;
        r.kernel = kernel;
        for (int i = 0; i < 3; ++i) r.grid[i] = shape[i], r.block[i] = shape[3 + i], r.cluster[i] = shape[6 + i];
        r.dynamic_shared = dynamic_shared;
        r.args = args;
        r.rank = rank;
        r.queue = static_cast<uint64_t>(rank) << 48;
        *error = Machine::get().launch(static_cast<LoadedModule*>(module), r)->error;
    });
}

int sim_synchronize() {
    return Machine::get().synchronize(0, true);
}

void sim_set_rank(int rank) {
    set_host_rank(rank);
}

void sim_add_memory(uint64_t base, uint64_t bytes, const char* name, bool is_read_only, bool is_initialized) {
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    m.memory.add(base, bytes, name, is_read_only, is_initialized);
}

void sim_remove_memory(uint64_t base) {
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    m.memory.remove(base);
}

bool sim_configure(const char* name, double value) {
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    Config& c = m.config;
    const std::string key = name;
    if (key == "checks")
        c.checks = static_cast<uint32_t>(value);
    else if (key == "seed")
        c.seed = static_cast<uint64_t>(value);
    else if (key == "num_sms")
        c.num_sms = static_cast<int>(value);
    else if (key == "max_ctas_per_sm")
        c.max_ctas_per_sm = static_cast<int>(value);
    else if (key == "async_rate")
        c.async_rate = value;
    else if (key == "deadlock_ns")
        c.deadlock_ns = static_cast<uint64_t>(value);
    else if (key == "num_ranks")
        c.num_ranks = static_cast<int>(value);
    else if (key == "grace_ms")
        c.grace_ms = static_cast<uint64_t>(value);
    else if (key == "is_blocking")
        c.is_blocking = value != 0;
    else if (key == "allow_unknown_memory")
        c.allow_unknown_memory = value != 0;
    else
        return false;
    return true;
}

// "kind\x1ftext\x1e" per report; forgets them.
const char* sim_take_reports() {
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    result_text.clear();
    for (auto& r : m.reports) result_text += r.kind + "\x1f" + r.text + "\x1e";
    m.reports.clear();
    m.report_keys.clear();
    m.pending_error = 0;
    return result_text.c_str();
}

void sim_statistics(double* thread_instructions, double* seconds) {
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    *thread_instructions = static_cast<double>(m.thread_instructions);
    *seconds = m.busy_seconds;
}

const char* sim_instruction_table() {
    result_text = instruction_table_text();
    return result_text.c_str();
}

bool sim_embedded_ptx(const char* kernel, const char** text) {
    return guarded([&] {
        result_text = embedded_ptx(kernel);
        *text = result_text.c_str();
    });
}
bool sim_replace_ptx(const char* kernel, const char* text) {
    return guarded([&] { replace_ptx(kernel, text); });
}

void* sim_tensor_map_encoder() {
    return tensor_map_encoder();
}

}  // extern "C"
