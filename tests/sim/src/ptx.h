// PTX text as data: modules, functions, statements and operands, with nothing decided about their meaning.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace moksim {

// Anything in the PTX (or in its use) that the simulator does not know. It names the line and the instruction.
struct PtxError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Operand {
    enum Kind { kRegister, kImmediate, kSymbol, kAddress, kVector, kSink };
    Kind kind = kSink;
    std::string name;               // register, symbol or address base; empty for an absolute address
    std::string second;             // q of a predicate pair p|q
    bool negated = false;           // !p
    bool is_float = false;          // 0f... or 0d... immediate
    uint64_t value = 0;             // immediate: its bits (two's complement, or IEEE bits of the literal's own width)
    int64_t offset = 0;             // address or symbol: added bytes
    std::vector<Operand> elements;  // vector; for an address: what follows the base, as in [map, {x, y}]
};

struct Instruction {
    std::string guard;  // predicate register, or empty
    bool guard_negated = false;
    std::string opcode;  // with its modifiers, such as "ld.global.v4.b32"
    std::vector<Operand> operands;
    int ptx_line = 0;
    int file = 0, line = 0;                // from .loc; 0 if there is none
    int caller_file = 0, caller_line = 0;  // where the function of that line was inlined
};

// A variable in any state space; offset is given when the function or module is laid out.
struct Variable {
    std::string name, space, type;
    uint64_t align = 1, size = 0;  // size 0: extern array (dynamic shared memory)
    std::vector<uint8_t> init;
    std::vector<std::pair<uint64_t, std::string>> init_symbols;  // addresses to store into init
    uint64_t offset = 0;
};

struct Function {
    std::string name;
    bool is_entry = false, is_declaration = false;
    std::vector<Variable> returns, params;
    std::vector<Variable> locals;                            // .local, .shared and .param variables of the body
    std::unordered_map<std::string, std::string> registers;  // unique name -> type ("pred", "b32", ...)
    std::vector<Instruction> body;
    std::unordered_map<std::string, uint32_t> labels;                    // unique name -> index into body
    std::unordered_map<std::string, std::vector<std::string>> branches;  // .branchtargets
    int max_threads = 0, min_ctas = 0, max_registers = 0;
    int cluster[3] = {0, 0, 0};  // .reqnctapercluster
};

struct Module {
    std::vector<std::unique_ptr<Function>> functions;
    std::vector<Variable> globals;  // .global, .const and module-scope .shared
    std::map<int, std::string> files;
};

// Throws PtxError. Names declared in nested braces are made unique, so lookups after parsing are flat.
Module parse_ptx(const std::string& text);

uint64_t type_size(const std::string& type);  // bytes of "u32", "b64", "pred" (1), ...

}  // namespace moksim
