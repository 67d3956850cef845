// Lowers one entry function and its callees: symbols, register numbers and constants while instructions are decoded.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa.h"

namespace moksim {

struct VirtualRegister {
    bool is_wide = false, is_pinned = false;
    uint32_t first = ~0u, last = 0;  // live interval, in op indices
    Ref slot = kNoRef;
};

using RegisterUse = std::pair<uint32_t, bool>;  // virtual register, is_definition
using Uses = std::vector<std::vector<RegisterUse>>;

class FunctionLowering {
  public:
    FunctionLowering(LoadedModule& m, Program& p, std::vector<Source>& s) : module_(m), program_(p), sources_(s) {}

    void lower_all(const Function& entry);

    // For decode functions.
    const Function& current() const { return *current_; }
    Program& program() { return program_; }
    uint32_t register_id(const std::string& name, bool* is_wide);
    uint16_t predicate(const std::string& name);
    Ref constant(uint64_t value, bool is_wide);
    const Variable* variable(const std::string& name) const;  // nullptr if unknown
    const Variable* variable_of(const std::string& function, const std::string& name) const;
    uint32_t label(const std::string& name) const;  // index into the current function's body
    const Function* find_function(const std::string& name) const;
    void call(const Function& callee);
    // Registers that a wgmma of this function may write after it was issued, and those copied from or to them.
    const std::set<std::string>& mma_registers() const { return mma_registers_; }

  private:
    void layout_module_shared();
    void layout_shared(Variable& v);
    void layout_params(const Function& f);
    void layout_function(const Function& f);
    void lower_function(const Function& f);
    void find_mma_registers(const Function& f);
    void decode(const Instruction& in, Uses& uses);
    std::string describe(const Instruction& in) const;
    void allocate(uint32_t base, const Uses& uses);
    std::vector<uint32_t> block_starts(uint32_t base, uint32_t count) const;
    std::vector<uint32_t> successors(uint32_t base, uint32_t i, uint32_t count) const;
    void assign_slots();
    Ref take_slot(bool is_wide);
    void patch(uint32_t base, const Uses& uses);

    LoadedModule& module_;
    Program& program_;
    std::vector<Source>& sources_;
    const Function* current_ = nullptr;
    std::vector<const Function*> todo_;
    std::set<std::string> laid_out_, mma_registers_;
    std::vector<std::pair<size_t, std::string>> calls_;  // op, callee
    std::string pending_call_;
    std::unordered_map<std::string, uint32_t> ids_, predicates_;
    std::vector<VirtualRegister> registers_;
    uint32_t first_register_ = 0;  // of the function that is lowered now
    std::map<std::pair<uint64_t, bool>, Ref> constants_;
    std::unordered_map<std::string, Variable> variables_;  // "function\nname"; the function is empty for globals
    uint64_t shared_bytes_ = 0, local_bytes_ = 0;
};

}  // namespace moksim
