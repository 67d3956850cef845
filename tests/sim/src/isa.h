// The instruction table and what a decode function has to work with.
//
// To add an instruction, add one row to the table of the file it belongs to (isa_*.cpp): its name, its section in the
// PTX ISA, one line that says what it does here, and a decode function that picks a handler. Nothing else is needed:
// liveness, register allocation, guards and divergence are handled around it.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "machine.h"

namespace moksim {

class FunctionLowering;

// One instruction while it is decoded. Errors name the instruction and what is unknown about it.
struct Decoder {
    const Instruction& in;
    FunctionLowering& function;
    Op op;
    std::vector<std::string> modifiers;  // those not yet taken
    std::vector<Ref> ext;
    std::vector<std::pair<uint32_t, bool>> refs;  // virtual register, is_definition

    Decoder(const Instruction& instruction, FunctionLowering& f) : in(instruction), function(f) {}

    [[noreturn]] void fail(const std::string& what) const;
    size_t size() const { return in.operands.size(); }
    void expect_operands(size_t low, size_t high) const;

    bool take(const std::string& modifier);
    // The one of these modifiers that is present, or "".
    std::string take_one(std::initializer_list<const char*> choices);
    std::string require_one(std::initializer_list<const char*> choices);
    std::string type();  // the next modifier that is a type
    bool has_type() const;
    void finish() const;  // fails on modifiers that nobody took

    // Register operands. `bytes` is the width that the handler reads or writes: 8 for 64-bit slots, else 32-bit ones.
    bool is_wide(const Operand& o) const;
    Ref source(const Operand& o, int bytes);
    Ref dest(const Operand& o, int bytes);
    Ref source(size_t i, int bytes) { return source(operand(i), bytes); }
    Ref dest(size_t i, int bytes) { return dest(operand(i), bytes); }
    uint16_t predicate(const std::string& name);
    void predicate_dest(size_t i);    // p or p|q into op.pd, op.pq
    void predicate_source(size_t i);  // p or !p into op.ps
    bool is_predicate(size_t i) const;
    const Operand& operand(size_t i) const;
    uint64_t immediate(size_t i) const;

    // [register + offset], [symbol + offset] or [offset]: base into the result (kNoRef if there is none), offset into
    // *offset.
    struct Address {
        Ref base = kNoRef;
        bool is_wide = false;
        int64_t offset = 0;
        std::string space;  // of the symbol, if the base is one: shared, local, global, const, param
        bool is_entry_param = false;
    };
    Address address(const Operand& o);

    // Appends an operand (or each element of a vector) to op's further operands.
    void push_source(const Operand& o, int bytes);
    void push_dest(const Operand& o, int bytes);
};

struct InstructionDef {
    const char* name;  // without modifiers; the longest name that fits an opcode wins
    const char* section;
    const char* summary;
    void (*decode)(Decoder&);
};

using InstructionTable = std::vector<InstructionDef>;
extern const InstructionTable kAluInstructions, kConvertInstructions, kMemoryInstructions, kControlInstructions,
    kWarpInstructions, kBarrierInstructions, kAsyncInstructions, kMmaInstructions;

const InstructionDef& find_instruction(const Instruction& in, std::vector<std::string>* modifiers);
std::string instruction_table_text();

std::unique_ptr<Program> lower(LoadedModule& module, const std::string& kernel, std::vector<Source>& sources);
void load_module_variables(LoadedModule& module, Memory& memory);

// Values of the registers that only the machine writes; id is the index into this list.
extern const std::vector<std::string> kSpecialRegisters;
int special_register(const std::string& name);  // -1 if it is none

// Lane loops

struct Half {
    uint16_t bits;
};
struct Bfloat {
    uint16_t bits;
};
struct HalfPair {
    uint32_t bits;
};
struct BfloatPair {
    uint32_t bits;
};

template <class T>
using SlotOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline T from_slot(SlotOf<T> slot) {
    T value;
    memcpy(&value, &slot, sizeof(T));
    return value;
}
template <class T>
inline SlotOf<T> to_slot(T value) {
    SlotOf<T> slot = 0;
    memcpy(&slot, &value, sizeof(T));
    return slot;
}

template <class Slot>
inline void store_lanes(Slot* to, const Slot* from, uint32_t mask) {
    if (mask == kAllLanes) {
        memcpy(to, from, kLanes * sizeof(Slot));
    } else {
        for (int i = 0; i < kLanes; ++i) to[i] = (mask >> i & 1) ? from[i] : to[i];
    }
}

// d = F(a), F(a, b) or F(a, b, c) in every lane. F must be harmless on any bits: inactive lanes are computed too.
template <class F, class D, class A>
Status unary(Warp& w, const Op& op, uint32_t mask) {
    const auto* a = w.at<SlotOf<A>>(op.a);
    SlotOf<D> result[kLanes];
    for (int i = 0; i < kLanes; ++i) result[i] = to_slot<D>(F{}(from_slot<A>(a[i])));
    store_lanes(w.at<SlotOf<D>>(op.d), result, mask);
    return Status::kNext;
}
template <class F, class D, class A, class B>
Status binary(Warp& w, const Op& op, uint32_t mask) {
    const auto* a = w.at<SlotOf<A>>(op.a);
    const auto* b = w.at<SlotOf<B>>(op.b);
    SlotOf<D> result[kLanes];
    for (int i = 0; i < kLanes; ++i) result[i] = to_slot<D>(F{}(from_slot<A>(a[i]), from_slot<B>(b[i])));
    store_lanes(w.at<SlotOf<D>>(op.d), result, mask);
    return Status::kNext;
}
template <class F, class D, class A, class B, class C>
Status ternary(Warp& w, const Op& op, uint32_t mask) {
    const auto* a = w.at<SlotOf<A>>(op.a);
    const auto* b = w.at<SlotOf<B>>(op.b);
    const auto* c = w.at<SlotOf<C>>(op.c);
    SlotOf<D> result[kLanes];
    for (int i = 0; i < kLanes; ++i)
        result[i] = to_slot<D>(F{}(from_slot<A>(a[i]), from_slot<B>(b[i]), from_slot<C>(c[i])));
    store_lanes(w.at<SlotOf<D>>(op.d), result, mask);
    return Status::kNext;
}

// Number formats (isa_convert.cpp)

enum class Rounding { kNearest, kZero, kDown, kUp };

// x in a binary format with these exponent and mantissa bits, as bits. `has_infinity` false: e4m3 (9.7.9.22: the
// largest exponent also holds numbers, only all ones is NaN).
struct FloatFormat {
    int exponent_bits, mantissa_bits;
    bool has_infinity;
};
constexpr FloatFormat kF16{5, 10, true}, kBf16{8, 7, true}, kE4m3{4, 3, false}, kE5m2{5, 2, true};
uint32_t round_to_format(double x, FloatFormat format, Rounding rounding, bool saturate);

inline float to_float(Bfloat x) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}
float to_float(Half x);
inline float to_float(float x) {
    return x;
}
inline Bfloat to_bfloat(float x) {
    const auto bits = __builtin_bit_cast(uint32_t, x);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
Half to_half(float x);

}  // namespace moksim
