// Control flow and what concerns a thread as a whole (PTX ISA 9.7.12, 9.7.19).
#include "isa.h"
#include "lowering.h"

namespace moksim {
namespace {

Status do_branch(Warp& w, const Op& op, uint32_t mask) {
    return branch(w, mask, op.target);
}

void decode_bra(Decoder& d) {
    d.take("uni");
    d.expect_operands(1, 1);
    d.op.target = d.function.label(d.operand(0).name);
    d.op.fn = &do_branch;
    d.op.flags |= kMmaSafe;
}

Status do_branch_index(Warp& w, const Op& op, uint32_t mask) {
    const uint32_t* table = &w.program->jump_tables[op.x];
    const auto* index = w.at<uint32_t>(op.a);
    const int lane = __builtin_ctz(mask);
    if (index[lane] >= op.y)
        Machine::get().fatal("bounds", format("brx.idx: index %u of %u targets", index[lane], op.y), &w, &op);
    uint32_t same = 0;
    for (int i = 0; i < kLanes; ++i)
        if ((mask >> i & 1) && index[i] == index[lane]) same |= 1u << i;
    if (same != w.mask && same != mask) {  // the rest takes this instruction again
        w.others.push_back({w.pc, w.mask & ~same, Group::kReady, 0, 0, w.returns});
        w.mask = same;
        w.other_pc = std::min(w.other_pc, w.pc);
    }
    return branch(w, same, op.target + table[index[lane]]);
}

void decode_brx(Decoder& d) {
    if (!d.take("idx")) d.fail("only brx.idx is known");
    d.take("uni");
    d.op.a = d.source(size_t{0}, 4);
    const auto& targets = d.function.current().branches.at(d.operand(1).name);
    auto& tables = d.function.program().jump_tables;
    d.op.x = static_cast<uint32_t>(tables.size());
    d.op.y = static_cast<uint32_t>(targets.size());
    for (auto& target : targets) tables.push_back(d.function.label(target));
    d.op.fn = &do_branch_index;
}

// Arguments and results are copied between local variables; jump_tables holds (from, to, size) triples.
void copy_locals(Warp& w, const Op& op, uint32_t first, uint32_t count, uint32_t mask) {
    const uint32_t* copies = &w.program->jump_tables[first];
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        uint8_t* local = w.local.data() + static_cast<size_t>(lane) * w.program->local_bytes;
        for (uint32_t k = 0; k < count; ++k)
            memcpy(local + copies[3 * k + 1], local + copies[3 * k], copies[3 * k + 2]);
    }
    (void)op;
}

Status do_call(Warp& w, const Op& op, uint32_t mask) {
    copy_locals(w, op, op.x, op.y, mask);
    if (mask != w.mask) {
        w.others.push_back({w.pc + 1, w.mask & ~mask, Group::kReady, 0, 0, w.returns});
        w.mask = mask;
    }
    w.returns.push_back(w.pc);
    w.other_pc = ~0u;  // others have another call stack: they wait until this one returns, blocks or loops
    w.pc = op.target;
    return Status::kJump;
}

Status do_return(Warp& w, const Op&, uint32_t mask) {
    if (w.returns.empty()) {
        w.live &= ~mask;
        w.mask &= ~mask;
        ++w.pc;
        return Status::kJump;
    }
    const uint32_t call = w.returns.back();
    if (mask != w.mask) {
        w.others.push_back({w.pc + 1, w.mask & ~mask, Group::kReady, 0, 0, w.returns});
        w.mask = mask;
    }
    const Op& op = w.program->ops[call];
    w.returns.pop_back();
    copy_locals(w, op, static_cast<uint32_t>(op.imm >> 32), static_cast<uint32_t>(op.imm), mask);
    w.pc = call + 1;
    w.other_pc = ~0u;
    for (auto& g : w.others)
        if (g.state == Group::kReady) w.other_pc = std::min(w.other_pc, g.pc);
    return Status::kJump;
}

Status assert_failed(Warp& w, const Op& op, uint32_t) {
    auto text = [&](uint32_t i) {
        uint64_t pointer;
        const int lane = __builtin_ctz(w.mask);
        memcpy(&pointer,
               w.local.data() + static_cast<size_t>(lane) * w.program->local_bytes + w.program->jump_tables[op.x + i],
               8);
        return std::string(reinterpret_cast<const char*>(pointer));
    };
    Machine::get().fatal("assert", "assertion failed: " + text(0), &w, &op);
}

Status print(Warp& w, const Op& op, uint32_t mask) {  // vprintf: the format string only
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const uint8_t* local = w.local.data() + static_cast<size_t>(lane) * w.program->local_bytes;
        uint64_t pointer;
        memcpy(&pointer, local + w.program->jump_tables[op.x], 8);
        fprintf(stderr, "[%s lane %d] %s", name_of(w).c_str(), lane, reinterpret_cast<const char*>(pointer));
    }
    return Status::kNext;
}

void decode_call(Decoder& d) {
    d.take("uni");
    const auto& results = d.operand(0).elements;
    const std::string& name = d.operand(1).name;
    const auto& arguments = d.operand(2).elements;
    auto& tables = d.function.program().jump_tables;
    d.op.x = static_cast<uint32_t>(tables.size());
    if (name == "vprintf" || name == "__assertfail") {
        for (auto& a : arguments) tables.push_back(static_cast<uint32_t>(d.function.variable(a.name)->offset));
        d.op.fn = name == "vprintf" ? &print : &assert_failed;
        return;
    }
    const Function* callee = d.function.find_function(name);
    if (!callee || callee->is_declaration) d.fail("unknown function " + name);
    d.function.call(*callee);
    auto copy = [&](const Variable* from, const Variable* to) {
        tables.insert(tables.end(), {static_cast<uint32_t>(from->offset), static_cast<uint32_t>(to->offset),
                                     static_cast<uint32_t>(from->size)});
    };
    if (arguments.size() != callee->params.size() || results.size() != callee->returns.size())
        d.fail("wrong number of arguments");
    for (size_t i = 0; i < arguments.size(); ++i)
        copy(d.function.variable(arguments[i].name), d.function.variable_of(name, callee->params[i].name));
    d.op.y = static_cast<uint32_t>(arguments.size());
    d.op.imm = static_cast<uint64_t>(tables.size()) << 32 | results.size();
    for (size_t i = 0; i < results.size(); ++i)
        copy(d.function.variable_of(name, callee->returns[i].name), d.function.variable(results[i].name));
    d.op.fn = &do_call;
}

void decode_ret(Decoder& d) {
    d.take("uni");
    d.op.fn = &do_return;
}

Status do_exit(Warp& w, const Op&, uint32_t mask) {
    w.live &= ~mask;
    w.mask &= ~mask;
    ++w.pc;
    return Status::kJump;
}
void decode_exit(Decoder& d) {
    d.op.fn = &do_exit;
}

Status do_trap(Warp& w, const Op& op, uint32_t) {
    Machine::get().fatal("trap", "trap executed", &w, &op);
}
void decode_trap(Decoder& d) {
    d.op.fn = &do_trap;
}

Status nothing(Warp&, const Op&, uint32_t) {
    return Status::kNext;
}
void decode_nothing(Decoder& d) {
    d.modifiers.clear();
    d.op.fn = &nothing;
}

Status do_sleep(Warp& w, const Op& op, uint32_t mask) {
    const uint32_t ns = op.a == kNoRef ? static_cast<uint32_t>(op.imm) : w.at<uint32_t>(op.a)[__builtin_ctz(mask)];
    w.wait.kind = WaitKind::kSleep;
    Machine::get().sleep(w,
                         1 + w.random() % (2 * uint64_t{std::min(ns, 1000u)} + 1));  // up to twice as long (9.7.19.2)
    return Status::kYield;
}
void decode_nanosleep(Decoder& d) {
    d.type();
    if (d.operand(0).kind == Operand::kImmediate)
        d.op.imm = d.immediate(0);
    else
        d.op.a = d.source(size_t{0}, 4);
    d.op.fn = &do_sleep;
}

}  // namespace

const InstructionTable kControlInstructions = {
    {"bra", "9.7.12.3", "branch; a warp splits where lanes disagree", decode_bra},
    {"brx", "9.7.12.4", "branch through a table (.idx)", decode_brx},
    {"call", "9.7.12.5", "direct call; no recursion; vprintf prints its format, __assertfail ends the launch",
     decode_call},
    {"ret", "9.7.12.6", "return", decode_ret},
    {"exit", "9.7.12.7", "ends the thread", decode_exit},
    {"trap", "9.7.19.4", "ends the launch with an error", decode_trap},
    {"brkpt", "9.7.19.1", "does nothing", decode_nothing},
    {"pmevent", "9.7.19.3", "does nothing", decode_nothing},
    {"nanosleep", "9.7.19.2", "lets others run for up to twice that many steps", decode_nanosleep},
    {"griddepcontrol", "9.7.13.13", "does nothing: launches of one stream never overlap here", decode_nothing},
};

}  // namespace moksim
