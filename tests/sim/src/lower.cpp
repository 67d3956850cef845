// From parsed PTX to a Program: layout of variables, decoding through the instruction table, liveness and register
// slots.
#include <algorithm>
#include <set>

#include "lowering.h"

namespace moksim {

const std::vector<std::string> kSpecialRegisters = {"%shared_base",
                                                    "%dynamic_base",
                                                    "%laneid",
                                                    "%warpid",
                                                    "%nwarpid",
                                                    "%tid.x",
                                                    "%tid.y",
                                                    "%tid.z",
                                                    "%ntid.x",
                                                    "%ntid.y",
                                                    "%ntid.z",
                                                    "%ctaid.x",
                                                    "%ctaid.y",
                                                    "%ctaid.z",
                                                    "%nctaid.x",
                                                    "%nctaid.y",
                                                    "%nctaid.z",
                                                    "%smid",
                                                    "%nsmid",
                                                    "%lanemask_eq",
                                                    "%lanemask_le",
                                                    "%lanemask_lt",
                                                    "%lanemask_ge",
                                                    "%lanemask_gt",
                                                    "%cluster_ctaid.x",
                                                    "%cluster_ctaid.y",
                                                    "%cluster_ctaid.z",
                                                    "%cluster_nctaid.x",
                                                    "%cluster_nctaid.y",
                                                    "%cluster_nctaid.z",
                                                    "%cluster_ctarank",
                                                    "%cluster_nctarank",
                                                    "%clusterid.x",
                                                    "%clusterid.y",
                                                    "%clusterid.z",
                                                    "%nclusterid.x",
                                                    "%nclusterid.y",
                                                    "%nclusterid.z",
                                                    "%dynamic_smem_size",
                                                    "%total_smem_size"};

int special_register(const std::string& name) {
    for (size_t i = 0; i < kSpecialRegisters.size(); ++i)
        if (kSpecialRegisters[i] == name) return static_cast<int>(i);
    return -1;
}

static uint64_t align_up(uint64_t value, uint64_t align) {
    return (value + align - 1) / align * align;
}

void FunctionLowering::lower_all(const Function& entry) {
    layout_module_shared();
    lower_function(entry);
    while (!todo_.empty()) {
        const Function* f = todo_.back();
        todo_.pop_back();
        if (!program_.entries.count(f->name)) lower_function(*f);
    }
    for (auto& [pc, name] : calls_) program_.ops[pc].target = program_.entries.at(name);
    program_.shared_static = static_cast<uint32_t>(shared_bytes_);
    program_.local_bytes = static_cast<uint32_t>(align_up(local_bytes_, 16));
    for (auto& special : program_.specials) special.ref = registers_[special.ref].slot;
}

uint32_t FunctionLowering::register_id(const std::string& name, bool* is_wide) {
    const int special = special_register(name);
    const auto key = special >= 0 ? name : current_->name + "\n" + name;
    auto found = ids_.find(key);
    if (found == ids_.end()) {
        VirtualRegister r;
        if (special >= 0) {
            r.is_pinned = true;
            program_.specials.push_back({special, static_cast<Ref>(registers_.size())});
        } else {
            const auto declared = current_->registers.find(name);
            if (declared == current_->registers.end()) throw PtxError("unknown register " + name);
            r.is_wide = type_size(declared->second) == 8;
        }
        found = ids_.emplace(key, static_cast<uint32_t>(registers_.size())).first;
        registers_.push_back(r);
    }
    *is_wide = registers_[found->second].is_wide;
    return found->second;
}

uint16_t FunctionLowering::predicate(const std::string& name) {
    auto [found, is_new] = predicates_.emplace(current_->name + "\n" + name, program_.num_predicates);
    if (is_new) ++program_.num_predicates;
    if (program_.num_predicates > 65535) throw PtxError("too many predicates");
    return static_cast<uint16_t>(found->second);
}

Ref FunctionLowering::constant(uint64_t value, bool is_wide) {
    auto [found, is_new] = constants_.emplace(std::make_pair(value, is_wide), 0);
    if (is_new) {
        const size_t offset = program_.constants.size() * 8;
        program_.constants.resize(program_.constants.size() + (is_wide ? 32 : 16));
        auto* bytes = reinterpret_cast<uint8_t*>(program_.constants.data()) + offset;
        for (int i = 0; i < kLanes; ++i) memcpy(bytes + i * (is_wide ? 8 : 4), &value, is_wide ? 8 : 4);
        found->second = static_cast<Ref>(offset | 1);
    }
    return found->second;
}

const Variable* FunctionLowering::variable(const std::string& name) const {
    auto found = variables_.find(current_->name + "\n" + name);
    if (found == variables_.end()) found = variables_.find("\n" + name);
    return found == variables_.end() ? nullptr : &found->second;
}

const Variable* FunctionLowering::variable_of(const std::string& function, const std::string& name) const {
    return &variables_.at(function + "\n" + name);
}

uint32_t FunctionLowering::label(const std::string& name) const {
    auto found = current_->labels.find(name);
    if (found == current_->labels.end()) throw PtxError("unknown label " + name);
    return found->second;
}

const Function* FunctionLowering::find_function(const std::string& name) const {
    const Function* found = nullptr;
    for (auto& f : module_.module.functions)
        if (f->name == name && (!found || found->is_declaration)) found = f.get();
    return found;
}

// The callee's variables are laid out at once, so that the call can copy arguments into them.
void FunctionLowering::call(const Function& callee) {
    if (program_.entries.count(callee.name)) throw PtxError("recursion is not supported: " + callee.name);
    layout_params(callee);
    todo_.push_back(&callee);
    pending_call_ = callee.name;
}

void FunctionLowering::layout_shared(Variable& v) {
    if (!v.size) {
        program_.dynamic_align = std::max(program_.dynamic_align, static_cast<uint32_t>(v.align));
        return;
    }
    v.offset = align_up(kSharedReserved + shared_bytes_, v.align);
    shared_bytes_ = v.offset + v.size - kSharedReserved;
}

void FunctionLowering::layout_module_shared() {
    for (Variable v : module_.module.globals) {
        if (v.space == "shared")
            layout_shared(v);
        else
            v.offset = module_.symbols.at(v.name);
        variables_["\n" + v.name] = v;
    }
}

void FunctionLowering::layout_params(const Function& f) {
    if (!laid_out_.insert(f.name).second) return;
    for (const auto* list : {&f.params, &f.returns})
        for (Variable v : *list) {
            v.offset = align_up(local_bytes_, std::max<uint64_t>(v.align, 1));
            local_bytes_ = v.offset + v.size;
            v.space = "local";
            variables_[f.name + "\n" + v.name] = v;
        }
}

void FunctionLowering::layout_function(const Function& f) {
    if (f.is_entry) {
        for (Variable v : f.params) {
            v.offset = align_up(program_.param_bytes, v.align);
            program_.param_bytes = static_cast<uint32_t>(v.offset + v.size);
            program_.params.push_back({static_cast<uint32_t>(v.offset), static_cast<uint32_t>(v.size)});
            v.space = "entry_param";
            variables_[f.name + "\n" + v.name] = v;
        }
    } else {
        layout_params(f);
    }
    for (Variable v : f.locals) {
        if (v.space == "shared") {
            layout_shared(v);
        } else if (v.space == "local" || v.space == "param") {
            v.offset = align_up(local_bytes_, v.align);
            local_bytes_ = v.offset + v.size;
            v.space = "local";
        } else {
            throw PtxError("unsupported ." + v.space + " variable in a function: " + v.name);
        }
        variables_[f.name + "\n" + v.name] = v;
    }
}

// A wgmma writes its registers when it completes, so their slots must not be given away before: each wait_group counts
// as a use of all of them.
void FunctionLowering::find_mma_registers(const Function& f) {
    mma_registers_.clear();
    for (auto& in : f.body)
        if (in.opcode.compare(0, 15, "wgmma.mma_async") == 0)
            for (auto& e : in.operands.at(0).elements) mma_registers_.insert(e.name);
    for (bool changed = !mma_registers_.empty(); changed;) {
        changed = false;
        for (auto& in : f.body) {
            if (in.opcode != "mov.f32" && in.opcode != "mov.b32" && in.opcode != "mov.u32") continue;
            const Operand &to = in.operands[0], &from = in.operands[1];
            if (to.kind != Operand::kRegister || from.kind != Operand::kRegister || from.name[0] != '%') continue;
            if (special_register(from.name) >= 0 || !f.registers.count(from.name)) continue;
            const bool has_to = mma_registers_.count(to.name), has_from = mma_registers_.count(from.name);
            if (has_to == has_from) continue;
            mma_registers_.insert(has_to ? from.name : to.name);
            changed = true;
        }
    }
}

void FunctionLowering::lower_function(const Function& f) {
    current_ = &f;
    layout_function(f);
    find_mma_registers(f);
    const auto base = static_cast<uint32_t>(program_.ops.size());
    program_.entries[f.name] = base;
    Uses uses;
    for (const Instruction& in : f.body) decode(in, uses);
    Instruction end;  // falling off the end of a function returns (9.7.12.6)
    end.opcode = f.is_entry ? "exit" : "ret";
    decode(end, uses);
    allocate(base, uses);
}

void FunctionLowering::decode(const Instruction& in, Uses& uses) {
    Decoder d(in, *this);
    const InstructionDef& def = find_instruction(in, &d.modifiers);
    if (!in.guard.empty()) {
        d.op.guard = predicate(in.guard);
        d.op.guard_negated = in.guard_negated;
    }
    const auto base = program_.entries.at(current_->name);
    def.decode(d);
    d.finish();
    d.op.ext = static_cast<uint32_t>(program_.ext.size());
    d.op.num_ext = static_cast<uint32_t>(d.ext.size());
    program_.ext.insert(program_.ext.end(), d.ext.begin(), d.ext.end());
    d.op.id = static_cast<uint32_t>(sources_.size());
    sources_.push_back({describe(in)});
    if (!pending_call_.empty()) calls_.push_back({program_.ops.size(), pending_call_});
    pending_call_.clear();
    d.op.target += base;  // labels are indices into the function's body; calls are patched later
    program_.ops.push_back(d.op);
    uses.push_back(std::move(d.refs));
}

std::string FunctionLowering::describe(const Instruction& in) const {
    auto place = [&](int file, int line) {
        auto found = module_.module.files.find(file);
        if (found == module_.module.files.end()) return std::string();
        return found->second.substr(found->second.rfind('/') + 1) + ":" + std::to_string(line);
    };
    const std::string inner = place(in.file, in.line), outer = place(in.caller_file, in.caller_line);
    if (inner.empty()) return "PTX line " + std::to_string(in.ptx_line) + ": " + in.opcode;
    return inner + (outer.empty() ? "" : " (in " + outer + ")") + ": " + in.opcode;
}

// Live intervals from a backward data-flow analysis over the function's basic blocks, then linear-scan slots.
void FunctionLowering::allocate(uint32_t base, const Uses& uses) {
    const auto count = static_cast<uint32_t>(uses.size());
    std::vector<uint32_t> starts = block_starts(base, count);
    const size_t words = (registers_.size() + 63) / 64;
    using Bits = std::vector<uint64_t>;
    const size_t blocks = starts.size();
    std::vector<Bits> in(blocks, Bits(words)), out(blocks, Bits(words)), use = in, def = in;
    for (size_t b = 0; b < blocks; ++b) {
        const uint32_t end = b + 1 < blocks ? starts[b + 1] : count;
        for (uint32_t i = starts[b]; i < end; ++i) {
            const bool is_guarded = program_.ops[base + i].guard;
            for (auto [r, is_def] : uses[i])
                if ((!is_def || is_guarded) && !(def[b][r / 64] >> (r % 64) & 1)) use[b][r / 64] |= 1ull << r % 64;
            for (auto [r, is_def] : uses[i])
                if (is_def && !is_guarded) def[b][r / 64] |= 1ull << r % 64;
        }
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t b = blocks; b-- > 0;) {
            const uint32_t end = b + 1 < blocks ? starts[b + 1] : count;
            for (uint32_t s : successors(base, end - 1, count)) {
                const size_t t = std::upper_bound(starts.begin(), starts.end(), s) - starts.begin() - 1;
                for (size_t k = 0; k < words; ++k) out[b][k] |= in[t][k];
            }
            for (size_t k = 0; k < words; ++k) {
                const uint64_t value = use[b][k] | (out[b][k] & ~def[b][k]);
                changed |= value != in[b][k];
                in[b][k] = value;
            }
        }
    }
    auto extend = [&](uint32_t r, uint32_t at) {
        registers_[r].first = std::min(registers_[r].first, at);
        registers_[r].last = std::max(registers_[r].last, at);
    };
    for (size_t b = 0; b < blocks; ++b) {
        const uint32_t end = (b + 1 < blocks ? starts[b + 1] : count) - 1;
        for (uint32_t r = 0; r < registers_.size(); ++r) {
            if (in[b][r / 64] >> r % 64 & 1) extend(r, starts[b]);
            if (out[b][r / 64] >> r % 64 & 1) extend(r, end);
        }
    }
    for (uint32_t i = 0; i < count; ++i)
        for (auto [r, is_def] : uses[i]) extend(r, i);
    assign_slots();
    patch(base, uses);
    first_register_ = registers_.size();
}

std::vector<uint32_t> FunctionLowering::block_starts(uint32_t base, uint32_t count) const {
    std::set<uint32_t> starts = {0};
    for (uint32_t i = 0; i < count; ++i) {
        const auto next = successors(base, i, count);
        if (next.size() == 1 && next[0] == i + 1) continue;
        for (uint32_t s : next) starts.insert(s);
        if (i + 1 < count) starts.insert(i + 1);
    }
    return {starts.begin(), starts.end()};
}

std::vector<uint32_t> FunctionLowering::successors(uint32_t base, uint32_t i, uint32_t count) const {
    const Instruction* in = i < current_->body.size() ? &current_->body[i] : nullptr;
    const std::string name = in ? in->opcode.substr(0, in->opcode.find('.')) : "exit";
    std::vector<uint32_t> result;
    const bool falls_through = program_.ops[base + i].guard ||
                               (name != "bra" && name != "brx" && name != "ret" && name != "exit" && name != "trap");
    if (falls_through && i + 1 < count) result.push_back(i + 1);
    if (name == "bra") result.push_back(label(in->operands[0].name));
    if (name == "brx")
        for (auto& target : current_->branches.at(in->operands[1].name)) result.push_back(label(target));
    return result;
}

// Callees get slots above their callers', since a caller's registers stay alive across the call.
void FunctionLowering::assign_slots() {
    std::vector<uint32_t> order;
    for (uint32_t r = first_register_; r < registers_.size(); ++r) {
        VirtualRegister& v = registers_[r];
        if (v.is_pinned) v.slot = take_slot(v.is_wide);
        if (!v.is_pinned && v.first != ~0u) order.push_back(r);
    }
    std::sort(order.begin(), order.end(),
              [&](uint32_t x, uint32_t y) { return registers_[x].first < registers_[y].first; });
    std::vector<uint32_t> free_slots[2];
    std::set<std::pair<uint32_t, uint32_t>> active;  // last use, register
    for (uint32_t r : order) {
        while (!active.empty() && active.begin()->first < registers_[r].first) {
            const VirtualRegister& old = registers_[active.begin()->second];
            free_slots[old.is_wide].push_back(old.slot);
            active.erase(active.begin());
        }
        VirtualRegister& v = registers_[r];
        auto& list = free_slots[v.is_wide];
        if (list.empty()) {
            v.slot = take_slot(v.is_wide);
        } else {
            v.slot = list.back();
            list.pop_back();
        }
        active.insert({v.last, r});
    }
}

Ref FunctionLowering::take_slot(bool is_wide) {
    const Ref slot = program_.register_bytes;
    program_.register_bytes += is_wide ? 256 : 128;
    return slot;
}

void FunctionLowering::patch(uint32_t base, const Uses& uses) {
    auto fix = [&](Ref& ref) {
        if (ref != kNoRef && !(ref & 1)) ref = registers_[ref >> 1].slot;
    };
    for (size_t i = 0; i < uses.size(); ++i) {
        Op& op = program_.ops[base + i];
        for (Ref* ref : {&op.d, &op.a, &op.b, &op.c}) fix(*ref);
        for (uint32_t k = 0; k < op.num_ext; ++k) fix(program_.ext[op.ext + k]);
        op.refs = static_cast<uint32_t>(program_.refs.size());
        for (auto [r, is_def] : uses[i]) program_.refs.push_back(registers_[r].slot);
        op.num_refs = static_cast<uint32_t>(program_.refs.size()) - op.refs;
    }
}

// Decoder

void Decoder::fail(const std::string& what) const {
    throw PtxError("PTX line " + std::to_string(in.ptx_line) + ": " + in.opcode + ": " + what);
}

void Decoder::expect_operands(size_t low, size_t high) const {
    if (size() < low || size() > high) fail("unexpected number of operands: " + std::to_string(size()));
}

const Operand& Decoder::operand(size_t i) const {
    if (i >= size()) fail("operand " + std::to_string(i) + " is missing");
    return in.operands[i];
}

bool Decoder::take(const std::string& modifier) {
    auto found = std::find(modifiers.begin(), modifiers.end(), modifier);
    if (found == modifiers.end()) return false;
    modifiers.erase(found);
    return true;
}

std::string Decoder::take_one(std::initializer_list<const char*> choices) {
    for (const char* choice : choices)
        if (take(choice)) return choice;
    return "";
}

std::string Decoder::require_one(std::initializer_list<const char*> choices) {
    std::string found = take_one(choices);
    if (found.empty()) fail("none of the known variants");
    return found;
}

static bool is_type(const std::string& s) {
    static const std::set<std::string> types = {"pred",   "b8",     "b16",     "b32",    "b64",   "b128", "u8",
                                                "u16",    "u32",    "u64",     "s8",     "s16",   "s32",  "s64",
                                                "f16",    "f16x2",  "bf16",    "bf16x2", "f32",   "f64",  "tf32",
                                                "e4m3x2", "e5m2x2", "ue8m0x2", "u16x2",  "s16x2", "e4m3", "e5m2"};
    return types.count(s);
}

bool Decoder::has_type() const {
    return std::any_of(modifiers.begin(), modifiers.end(), is_type);
}

std::string Decoder::type() {
    auto found = std::find_if(modifiers.begin(), modifiers.end(), is_type);
    if (found == modifiers.end()) fail("no known type");
    std::string result = *found;
    modifiers.erase(found);
    return result;
}

void Decoder::finish() const {
    if (!modifiers.empty()) fail("unknown modifier ." + modifiers[0]);
    if (!op.fn) fail("no handler");
}

bool Decoder::is_wide(const Operand& o) const {
    if (o.kind != Operand::kRegister) return false;
    auto found = function.current().registers.find(o.name);
    return found != function.current().registers.end() && type_size(found->second) == 8;
}

Ref Decoder::source(const Operand& o, int bytes) {
    if (o.kind == Operand::kImmediate) {
        uint64_t value = o.value;
        if (bytes < 8) value &= (1ull << 8 * bytes) - 1;
        return function.constant(value, bytes == 8);
    }
    if (o.kind != Operand::kRegister) fail("expected a register or a number: " + o.name);
    bool wide;
    const uint32_t id = function.register_id(o.name, &wide);
    if (wide != (bytes == 8)) fail("register of another width: " + o.name);
    refs.push_back({id, false});
    return id << 1;
}

Ref Decoder::dest(const Operand& o, int bytes) {
    bool wide = bytes == 8;
    uint32_t id;
    if (o.kind == Operand::kSink) {
        fail("a sink '_' is not supported here");
    } else if (o.kind != Operand::kRegister) {
        fail("expected a register: " + o.name);
    } else {
        id = function.register_id(o.name, &wide);
    }
    if (wide != (bytes == 8)) fail("register of another width: " + o.name);
    refs.push_back({id, true});
    return id << 1;
}

uint16_t Decoder::predicate(const std::string& name) {
    return function.predicate(name);
}

bool Decoder::is_predicate(size_t i) const {
    const Operand& o = operand(i);
    auto found = function.current().registers.find(o.name);
    return o.kind == Operand::kRegister && found != function.current().registers.end() && found->second == "pred";
}

void Decoder::predicate_dest(size_t i) {
    const Operand& o = operand(i);
    if (o.kind != Operand::kSink) op.pd = predicate(o.name);
    if (!o.second.empty() && o.second != "_") op.pq = predicate(o.second);
}

void Decoder::predicate_source(size_t i) {
    const Operand& o = operand(i);
    if (!is_predicate(i)) fail("expected a predicate: " + o.name);
    op.ps = predicate(o.name);
    op.ps_negated = o.negated;
}

uint64_t Decoder::immediate(size_t i) const {
    if (operand(i).kind != Operand::kImmediate) fail("expected a number as operand " + std::to_string(i));
    return operand(i).value;
}

Decoder::Address Decoder::address(const Operand& o) {
    if (o.kind != Operand::kAddress && o.kind != Operand::kSymbol) fail("expected an address");
    Address result;
    result.offset = o.offset;
    if (o.name.empty()) return result;
    if (function.current().registers.count(o.name)) {
        Operand base;
        base.kind = Operand::kRegister;
        base.name = o.name;
        result.is_wide = is_wide(base);
        result.base = source(base, result.is_wide ? 8 : 4);
        return result;
    }
    const Variable* v = function.variable(o.name);
    if (!v) fail("unknown symbol " + o.name);
    result.space = v->space;
    result.offset += static_cast<int64_t>(v->offset);
    if (v->space == "shared") {
        Operand base;
        base.kind = Operand::kRegister;
        base.name = v->size ? "%shared_base" : "%dynamic_base";
        result.base = source(base, 4);
    }
    result.is_entry_param = v->space == "entry_param";
    return result;
}

void Decoder::push_source(const Operand& o, int bytes) {
    if (o.kind == Operand::kVector) {
        for (auto& e : o.elements) push_source(e, bytes);
    } else {
        ext.push_back(source(o, bytes));
    }
}

void Decoder::push_dest(const Operand& o, int bytes) {
    if (o.kind == Operand::kVector) {
        for (auto& e : o.elements) push_dest(e, bytes);
    } else {
        ext.push_back(o.kind == Operand::kSink ? kNoRef : dest(o, bytes));
    }
}

// The table

static const std::vector<const InstructionTable*>& tables() {
    static const std::vector<const InstructionTable*> all = {
        &kAluInstructions,  &kConvertInstructions, &kMemoryInstructions, &kControlInstructions,
        &kWarpInstructions, &kBarrierInstructions, &kAsyncInstructions,  &kMmaInstructions};
    return all;
}

const InstructionDef& find_instruction(const Instruction& in, std::vector<std::string>* modifiers) {
    static const auto index = [] {
        std::unordered_map<std::string, const InstructionDef*> result;
        for (auto* table : tables())
            for (auto& def : *table) result[def.name] = &def;
        return result;
    }();
    std::string name = in.opcode;
    modifiers->clear();
    while (true) {
        auto found = index.find(name);
        if (found != index.end()) return *found->second;
        const size_t dot = name.rfind('.');
        if (dot == std::string::npos) break;
        modifiers->insert(modifiers->begin(), name.substr(dot + 1));
        name.resize(dot);
    }
    throw PtxError("PTX line " + std::to_string(in.ptx_line) + ": unknown instruction " + in.opcode);
}

std::string instruction_table_text() {
    std::string text;
    for (auto* table : tables())
        for (auto& def : *table) text += format("%-28s %-14s %s\n", def.name, def.section, def.summary);
    return text;
}

std::unique_ptr<Program> lower(LoadedModule& module, const std::string& kernel, std::vector<Source>& sources) {
    auto program = std::make_unique<Program>();
    FunctionLowering lowering(module, *program, sources);
    const Function* entry = lowering.find_function(kernel);
    if (!entry || !entry->is_entry || entry->is_declaration) throw PtxError("no kernel named " + kernel);
    program->function = entry;
    program->name = kernel;
    lowering.lower_all(*entry);
    program->constants.resize(program->constants.size() + 8);
    program->constant_base = reinterpret_cast<uint8_t*>(program->constants.data());
    return program;
}

void load_module_variables(LoadedModule& module, Memory& memory) {
    for (auto& v : module.module.globals) {
        if (v.space == "shared") continue;
        auto bytes = std::make_unique<uint8_t[]>(v.size + v.align + 64);
        auto base = reinterpret_cast<Addr>(bytes.get());
        base = (base + v.align - 1) / v.align * v.align;
        memset(reinterpret_cast<void*>(base), 0, v.size);
        if (!v.init.empty()) memcpy(reinterpret_cast<void*>(base), v.init.data(), v.init.size());
        memory.add(base, v.size, "variable " + v.name, v.space == "const");
        module.symbols[v.name] = base;
        module.storage.push_back(std::move(bytes));
    }
    for (auto& v : module.module.globals)
        for (auto& [at, name] : v.init_symbols) {
            auto found = module.symbols.find(name);
            if (found == module.symbols.end()) throw PtxError("initialiser of " + v.name + ": unknown symbol " + name);
            memcpy(reinterpret_cast<void*>(module.symbols[v.name] + at), &found->second, 8);
        }
}

}  // namespace moksim
