// Integer, logic, floating-point, comparison and data-movement instructions (PTX ISA 9.7.1 to 9.7.9).
#include <bit>
#include <cmath>

#include "isa.h"

namespace moksim {
namespace {

template <class T>
struct Tag {
    using type = T;
};

template <class F>
Handler for_integer(Decoder& d, const std::string& type, F f) {
    if (type == "u16" || type == "b16") return f(Tag<uint16_t>{});
    if (type == "s16") return f(Tag<int16_t>{});
    if (type == "u32" || type == "b32") return f(Tag<uint32_t>{});
    if (type == "s32") return f(Tag<int32_t>{});
    if (type == "u64" || type == "b64") return f(Tag<uint64_t>{});
    if (type == "s64") return f(Tag<int64_t>{});
    d.fail("unsupported integer type ." + type);
}

template <class F>
Handler for_float(Decoder& d, const std::string& type, F f) {
    if (type == "f32") return f(Tag<float>{});
    if (type == "f64") return f(Tag<double>{});
    if (type == "f16") return f(Tag<Half>{});
    if (type == "bf16") return f(Tag<Bfloat>{});
    if (type == "f16x2") return f(Tag<HalfPair>{});
    if (type == "bf16x2") return f(Tag<BfloatPair>{});
    d.fail("unsupported floating-point type ." + type);
}

bool is_float_type(const std::string& t) {
    return t[0] == 'f' || t.compare(0, 2, "bf") == 0;
}
int bytes_of(const std::string& t) {
    return static_cast<int>(type_size(t));
}

void operands(Decoder& d, int dest_bytes, std::initializer_list<int> source_bytes) {
    d.expect_operands(1 + source_bytes.size(), 1 + source_bytes.size());
    Ref* slots[] = {&d.op.a, &d.op.b, &d.op.c};
    size_t i = 0;
    for (int bytes : source_bytes) {
        *slots[i] = d.source(i + 1, bytes);
        ++i;
    }
    d.op.d = d.dest(size_t{0}, dest_bytes);
}

template <class T>
using Wider =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

template <class T>
T wrap_add(T a, T b) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
}
template <class T>
T wrap_sub(T a, T b) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) - static_cast<std::make_unsigned_t<T>>(b));
}
template <class T>
T wrap_mul(T a, T b) {
    return static_cast<T>(static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b));
}
template <class T>
T high_mul(T a, T b) {
    return static_cast<T>(static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b) >> (8 * sizeof(T)));
}

// Floating point. Arithmetic on the 16-bit types goes through double, which holds products and sums of two of them well
// enough for one correct rounding, and pairs do so for each half.

inline float flush(float x) {
    return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x;
}

template <class T, class F>
T apply_float(F f, T a, T b, T c) {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
        return f(a, b, c);
    } else if constexpr (std::is_same_v<T, Half>) {
        const double r = f(double(to_float(a)), double(to_float(b)), double(to_float(c)));
        return {static_cast<uint16_t>(round_to_format(r, kF16, Rounding::kNearest, false))};
    } else if constexpr (std::is_same_v<T, Bfloat>) {
        const double r = f(double(to_float(a)), double(to_float(b)), double(to_float(c)));
        return {static_cast<uint16_t>(round_to_format(r, kBf16, Rounding::kNearest, false))};
    } else {
        using Half1 = std::conditional_t<std::is_same_v<T, HalfPair>, Half, Bfloat>;
        auto part = [&](int shift) -> uint32_t {
            auto get = [&](T x) { return Half1{static_cast<uint16_t>(x.bits >> shift)}; };
            return uint32_t{apply_float<Half1>(f, get(a), get(b), get(c)).bits} << shift;
        };
        return {part(0) | part(16)};
    }
}

struct AddFn {
    template <class T>
    T operator()(T a, T b, T) const {
        return a + b;
    }
};
struct SubFn {
    template <class T>
    T operator()(T a, T b, T) const {
        return a - b;
    }
};
struct MulFn {
    template <class T>
    T operator()(T a, T b, T) const {
        return a * b;
    }
};
struct FmaFn {
    template <class T>
    T operator()(T a, T b, T c) const {
        return std::fma(a, b, c);
    }
};
struct FmaReluFn {
    template <class T>
    T operator()(T a, T b, T c) const {
        const T r = std::fma(a, b, c);
        return r > 0 ? r : r != r ? r : T(0);
    }
};
struct DivFn {
    template <class T>
    T operator()(T a, T b, T) const {
        return a / b;
    }
};
struct MinFn {  // 9.7.3.11: a NaN loses against a number; -0 < +0
    template <class T>
    T operator()(T a, T b, T) const {
        if (a != a) return b;
        if (b != b) return a;
        return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
    }
};
struct MaxFn {
    template <class T>
    T operator()(T a, T b, T) const {
        if (a != a) return b;
        if (b != b) return a;
        return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
    }
};
struct MinNanFn {
    template <class T>
    T operator()(T a, T b, T c) const {
        return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : MinFn{}(a, b, c);
    }
};
struct MaxNanFn {
    template <class T>
    T operator()(T a, T b, T c) const {
        return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : MaxFn{}(a, b, c);
    }
};

template <class T, class F, bool kFlush>
struct FloatOp {
    static T in(T x) {
        if constexpr (kFlush && std::is_same_v<T, float>) return flush(x);
        return x;
    }
    static T out(T x) {  // the one NaN that arithmetic gives (9.7.3)
        if constexpr (std::is_same_v<T, float>) return x != x ? __builtin_bit_cast(float, 0x7fffffff) : in(x);
        return x;
    }
    T operator()(T a, T b) const { return out(apply_float<T>(F{}, in(a), in(b), T{})); }
    T operator()(T a, T b, T c) const { return out(apply_float<T>(F{}, in(a), in(b), in(c))); }
};
template <class T, class F>
struct SaturatedOp {
    T operator()(T a, T b, T c = T{}) const {
        if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
            const T r = F{}(a, b, c);
            return r > 0 ? std::min(r, T(1)) : T(0);
        }
        return T{};
    }
};

// add, sub, mul, min, max on floats: rounding .rn only.
template <class F>
void float_binary(Decoder& d, const std::string& type) {
    const bool ftz = d.take("ftz"), sat = d.take("sat");
    d.take("rn");
    d.op.fn = for_float(d, type, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if (sat) return &binary<SaturatedOp<T, F>, T, T, T>;
        if (ftz) return &binary<FloatOp<T, F, true>, T, T, T>;
        return &binary<FloatOp<T, F, false>, T, T, T>;
    });
    operands(d, bytes_of(type), {bytes_of(type), bytes_of(type)});
}

// Carries (9.7.2): one flag per lane and warp; add.cc writes it, addc reads it.
template <class T, bool kSub, bool kRead, bool kSave>
Status add_carry(Warp& w, const Op& op, uint32_t mask) {
    const auto *a = w.at<SlotOf<T>>(op.a), *b = w.at<SlotOf<T>>(op.b);
    SlotOf<T> r[kLanes];
    uint32_t& carries = w.predicates[0];
    uint32_t out = 0;
    for (int i = 0; i < kLanes; ++i) {
        const auto x = static_cast<unsigned __int128>(a[i]);
        const auto y = static_cast<unsigned __int128>(kSub ? static_cast<SlotOf<T>>(~b[i]) : b[i]);
        const unsigned carry = kRead ? carries >> i & 1 : kSub;
        const unsigned __int128 sum = x + y + carry;
        r[i] = static_cast<SlotOf<T>>(sum);
        out |= static_cast<uint32_t>(sum >> (8 * sizeof(T)) & 1) << i;
    }
    store_lanes(w.at<SlotOf<T>>(op.d), r, mask);
    if (kSave) carries = (carries & ~mask) | (out & mask);
    return Status::kNext;
}

template <bool kSub>
void decode_carry(Decoder& d, bool reads) {
    const bool saves = d.take("cc");
    const std::string t = d.type();
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if (reads) return saves ? &add_carry<T, kSub, true, true> : &add_carry<T, kSub, true, false>;
        return &add_carry<T, kSub, false, true>;
    });
    operands(d, bytes_of(t), {bytes_of(t), bytes_of(t)});
}

template <class T, bool kSub>
struct SaturatingAdd {
    T operator()(T a, T b) const {
        const auto r = kSub ? static_cast<Wider<T>>(a) - b : static_cast<Wider<T>>(a) + b;
        return static_cast<T>(std::clamp<Wider<T>>(r, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
    }
};

template <bool kSub>
void decode_add(Decoder& d) {
    if (std::find(d.modifiers.begin(), d.modifiers.end(), "cc") != d.modifiers.end())
        return decode_carry<kSub>(d, false);
    const std::string t = d.type();
    if (is_float_type(t)) return float_binary<std::conditional_t<kSub, SubFn, AddFn>>(d, t);
    const bool sat = d.take("sat");
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if (sat) return &binary<SaturatingAdd<T, kSub>, T, T, T>;
        using F = decltype([](T a, T b) { return kSub ? wrap_sub(a, b) : wrap_add(a, b); });
        return &binary<F, T, T, T>;
    });
    operands(d, bytes_of(t), {bytes_of(t), bytes_of(t)});
}

void decode_mul(Decoder& d) {
    const std::string t = d.type();
    if (is_float_type(t)) return float_binary<MulFn>(d, t);
    const std::string part = d.require_one({"lo", "hi", "wide"});
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if (part == "lo") return &binary<decltype([](T a, T b) { return wrap_mul(a, b); }), T, T, T>;
        if (part == "hi") return &binary<decltype([](T a, T b) { return high_mul(a, b); }), T, T, T>;
        if constexpr (sizeof(T) == 8) {
            d.fail("mul.wide of 64 bits");
        } else {
            using W = Wider<T>;
            return &binary<decltype([](T a, T b) { return static_cast<W>(a) * static_cast<W>(b); }), W, T, T>;
        }
    });
    const int bytes = bytes_of(t);
    operands(d, part == "wide" ? 2 * bytes : bytes, {bytes, bytes});
}

void decode_fma(Decoder& d, const std::string& t) {
    d.take("rn");
    const bool ftz = d.take("ftz"), relu = d.take("relu"), sat = d.take("sat");
    d.op.fn = for_float(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if (sat) return &ternary<SaturatedOp<T, FmaFn>, T, T, T, T>;
        if (relu) return &ternary<FloatOp<T, FmaReluFn, false>, T, T, T, T>;
        if (ftz) return &ternary<FloatOp<T, FmaFn, true>, T, T, T, T>;
        return &ternary<FloatOp<T, FmaFn, false>, T, T, T, T>;
    });
    const int bytes = bytes_of(t);
    operands(d, bytes, {bytes, bytes, bytes});
}

template <class T, bool kHigh, bool kRead, bool kSave>
Status mad_carry(Warp& w, const Op& op, uint32_t mask) {
    const auto *a = w.at<SlotOf<T>>(op.a), *b = w.at<SlotOf<T>>(op.b), *c = w.at<SlotOf<T>>(op.c);
    SlotOf<T> r[kLanes];
    uint32_t& carries = w.predicates[0];
    uint32_t out = 0;
    for (int i = 0; i < kLanes; ++i) {
        const T x = from_slot<T>(a[i]), y = from_slot<T>(b[i]);
        const auto product = to_slot<T>(kHigh ? high_mul(x, y) : wrap_mul(x, y));
        const unsigned __int128 sum = static_cast<unsigned __int128>(product) + c[i] + (kRead ? carries >> i & 1 : 0);
        r[i] = static_cast<SlotOf<T>>(sum);
        out |= static_cast<uint32_t>(sum >> (8 * sizeof(T)) & 1) << i;
    }
    store_lanes(w.at<SlotOf<T>>(op.d), r, mask);
    if (kSave) carries = (carries & ~mask) | (out & mask);
    return Status::kNext;
}

template <bool kRead>
void decode_mad_carry(Decoder& d) {
    const bool saves = d.take("cc"), is_high = d.require_one({"lo", "hi"}) == "hi";
    const std::string t = d.type();
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if (is_high) return saves ? &mad_carry<T, true, kRead, true> : &mad_carry<T, true, kRead, false>;
        return saves ? &mad_carry<T, false, kRead, true> : &mad_carry<T, false, kRead, false>;
    });
    const int bytes = bytes_of(t);
    operands(d, bytes, {bytes, bytes, bytes});
}

void decode_mad(Decoder& d) {
    if (std::find(d.modifiers.begin(), d.modifiers.end(), "cc") != d.modifiers.end()) return decode_mad_carry<false>(d);
    const std::string t = d.type();
    if (is_float_type(t)) return decode_fma(d, t);
    const std::string part = d.require_one({"lo", "hi", "wide"});
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if (part == "lo")
            return &ternary<decltype([](T a, T b, T c) { return wrap_add(wrap_mul(a, b), c); }), T, T, T, T>;
        if (part == "hi")
            return &ternary<decltype([](T a, T b, T c) { return wrap_add(high_mul(a, b), c); }), T, T, T, T>;
        if constexpr (sizeof(T) == 8) {
            d.fail("mad.wide of 64 bits");
        } else {
            using W = Wider<T>;
            using F = decltype([](T a, T b, W c) { return wrap_add<W>(static_cast<W>(a) * static_cast<W>(b), c); });
            return &ternary<F, W, T, T, W>;
        }
    });
    const int bytes = bytes_of(t), wide = part == "wide" ? 2 * bytes : bytes;
    operands(d, wide, {bytes, bytes, wide});
}

template <bool kRemainder>
void decode_div(Decoder& d) {
    const std::string t = d.type();
    if (is_float_type(t)) {
        d.take_one({"full", "approx", "rn"});  // .full and .approx within 2 ulp (9.7.3.8): exact here
        return float_binary<DivFn>(d, t);
    }
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        using F = decltype([](T a, T b) -> T {
            if (b == 0) return static_cast<T>(kRemainder ? a : ~T(0));  // unspecified (9.7.1.8)
            if (std::is_signed_v<T> && b == static_cast<T>(-1)) return kRemainder ? T(0) : wrap_sub(T(0), a);
            return static_cast<T>(kRemainder ? a % b : a / b);
        });
        return &binary<F, T, T, T>;
    });
    operands(d, bytes_of(t), {bytes_of(t), bytes_of(t)});
}

template <bool kMax>
void decode_min_max(Decoder& d) {
    const std::string t = d.type();
    if (is_float_type(t)) {
        if (d.take("NaN")) return float_binary<std::conditional_t<kMax, MaxNanFn, MinNanFn>>(d, t);
        return float_binary<std::conditional_t<kMax, MaxFn, MinFn>>(d, t);
    }
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        return &binary<decltype([](T a, T b) { return kMax ? std::max(a, b) : std::min(a, b); }), T, T, T>;
    });
    operands(d, bytes_of(t), {bytes_of(t), bytes_of(t)});
}

enum SignOp { kAbs, kNeg };
template <SignOp kOp>
void decode_sign(Decoder& d) {
    const std::string t = d.type();
    d.take("ftz");
    const int bytes = bytes_of(t);
    if (is_float_type(t)) {
        auto pick = [&](auto tag) -> Handler {
            using T = typename decltype(tag)::type;
            using F = decltype([](T x) -> T {
                const T signs = sizeof(T) == 8 ? static_cast<T>(1ull << 63) : static_cast<T>(1u << (8 * sizeof(T) - 1));
                return static_cast<T>(kOp == kAbs ? x & ~signs : x ^ signs);
            });
            return &unary<F, T, T>;
        };
        using Pair = decltype([](uint32_t x) -> uint32_t { return kOp == kAbs ? x & 0x7fff7fff : x ^ 0x80008000; });
        d.op.fn = t.back() == '2' && bytes == 4 && t != "f32" ? &unary<Pair, uint32_t, uint32_t>
                  : bytes == 8                                ? pick(Tag<uint64_t>{})
                  : bytes == 4                                ? pick(Tag<uint32_t>{})
                                                              : pick(Tag<uint16_t>{});
    } else {
        d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
            using T = typename decltype(tag)::type;
            return &unary<decltype([](T x) { return kOp == kAbs && !(x < 0) ? x : wrap_sub(T(0), x); }), T, T>;
        });
    }
    operands(d, bytes, {bytes});
}

// Bits

template <class F64, class F32>
void bit_unary(Decoder& d) {
    const std::string t = d.type();
    const int bytes = bytes_of(t);
    d.op.fn = bytes == 8 ? &unary<F64, uint32_t, uint64_t> : &unary<F32, uint32_t, uint32_t>;
    operands(d, 4, {bytes});
}

void decode_popc(Decoder& d) {
    bit_unary<decltype([](uint64_t x) { return uint32_t(std::popcount(x)); }),
              decltype([](uint32_t x) { return uint32_t(std::popcount(x)); })>(d);
}
void decode_clz(Decoder& d) {
    bit_unary<decltype([](uint64_t x) { return uint32_t(std::countl_zero(x)); }),
              decltype([](uint32_t x) { return uint32_t(std::countl_zero(x)); })>(d);
}
void decode_bfind(Decoder& d) {  // position of the highest bit that differs from the sign; ~0 if there is none
    const bool shift = d.take("shiftamt");
    const std::string t = d.type();
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        using U = std::make_unsigned_t<T>;
        constexpr int bits = 8 * sizeof(T);
        auto find = [](T x) {
            const U u = std::is_signed_v<T> && x < 0 ? static_cast<U>(~x) : static_cast<U>(x);
            return u ? bits - 1 - std::countl_zero(u) : -1;
        };
        using Find = decltype(find);
        if (shift)
            return &unary<decltype([](T x) {
                              const int p = Find{}(x);
                              return uint32_t(p < 0 ? -1 : bits - 1 - p);
                          }),
                          uint32_t, T>;
        return &unary<decltype([](T x) { return uint32_t(Find{}(x)); }), uint32_t, T>;
    });
    operands(d, 4, {bytes_of(t)});
}

template <class T>
T reverse_bits(T x) {
    T r = 0;
    for (unsigned i = 0; i < 8 * sizeof(T); ++i) r = static_cast<T>(r << 1 | (x >> i & 1));
    return r;
}
void decode_brev(Decoder& d) {
    const std::string t = d.type();
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        return &unary<decltype([](T x) { return reverse_bits(x); }), T, T>;
    });
    operands(d, bytes_of(t), {bytes_of(t)});
}

template <class T>
T extract_bits(T a, uint32_t position, uint32_t length) {  // 9.7.1.19
    using U = std::make_unsigned_t<T>;
    constexpr uint32_t bits = 8 * sizeof(T);
    position &= 0xff, length &= 0xff;
    const bool sign =
        std::is_signed_v<T> && length && (static_cast<U>(a) >> std::min(position + length - 1, bits - 1) & 1);
    U r = position < bits ? static_cast<U>(a) >> position : 0;
    if (length < bits) {
        const uint32_t have = position < bits ? std::min(length, bits - position) : 0;
        const U keep = have ? (have < bits ? (U(1) << have) - 1 : ~U(0)) : 0;
        r &= keep;
        if (sign) r |= ~keep;
    } else if (sign && position) {
        r |= position < bits ? ~(~U(0) >> position) : ~U(0);
    }
    return static_cast<T>(length ? r : 0);
}
void decode_bfe(Decoder& d) {
    const std::string t = d.type();
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        using F = decltype([](T a, uint32_t b, uint32_t c) { return extract_bits(a, b, c); });
        return &ternary<F, T, T, uint32_t, uint32_t>;
    });
    operands(d, bytes_of(t), {bytes_of(t), 4, 4});
}

template <class T>
Status insert_bits(Warp& w, const Op& op, uint32_t mask) {  // 9.7.1.20: d = b with length bits of a at position
    const T *a = w.at<T>(op.a), *b = w.at<T>(op.b);
    const auto* position = w.at<uint32_t>(op.c);
    const auto* length = w.at<uint32_t>(w.program->ext[op.ext]);
    T r[kLanes];
    constexpr uint32_t bits = 8 * sizeof(T);
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t p = position[i] & 0xff, n = length[i] & 0xff;
        const T field = n >= bits ? ~T(0) : (T(1) << n) - 1;
        const T at = p < bits ? field << p : 0;
        r[i] = p < bits ? (b[i] & ~at) | (a[i] << p & at) : b[i];
    }
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}
void decode_bfi(Decoder& d) {
    const int bytes = bytes_of(d.type());
    d.expect_operands(5, 5);
    d.op.a = d.source(1, bytes), d.op.b = d.source(2, bytes), d.op.c = d.source(3, 4);
    d.push_source(d.operand(4), 4);
    d.op.d = d.dest(size_t{0}, bytes);
    d.op.fn = bytes == 8 ? &insert_bits<uint64_t> : &insert_bits<uint32_t>;
}

void decode_bmsk(Decoder& d) {
    d.require_one({"clamp"});
    d.type();
    using F =
        decltype([](uint32_t a, uint32_t b) -> uint32_t { return a >= 32 ? 0 : (b >= 32 ? ~0u : (1u << b) - 1) << a; });
    d.op.fn = &binary<F, uint32_t, uint32_t, uint32_t>;
    operands(d, 4, {4, 4});
}

// Logic. On .pred the "registers" are lane masks.

enum Logic { kAnd, kOr, kXor, kNot };

template <Logic kOp>
Status logic_predicate(Warp& w, const Op& op, uint32_t mask) {
    const uint32_t a = w.predicate(static_cast<uint16_t>(op.x), op.ps_negated);
    const uint32_t b = w.predicate(static_cast<uint16_t>(op.y), op.imm);
    const uint32_t r = kOp == kAnd ? a & b : kOp == kOr ? a | b : kOp == kXor ? a ^ b : ~a;
    w.set_predicate(op.pd, r, mask);
    return Status::kNext;
}

template <Logic kOp>
void decode_logic(Decoder& d) {
    const std::string t = d.type();
    const size_t sources = kOp == kNot ? 1 : 2;
    if (t == "pred") {
        d.expect_operands(1 + sources, 1 + sources);
        d.predicate_dest(0);
        d.op.x = d.predicate(d.operand(1).name), d.op.ps_negated = d.operand(1).negated;
        if (sources == 2) d.op.y = d.predicate(d.operand(2).name), d.op.imm = d.operand(2).negated;
        d.op.fn = &logic_predicate<kOp>;
        return;
    }
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        if constexpr (kOp == kNot) return &unary<decltype([](T a) { return static_cast<T>(~a); }), T, T>;
        using F = decltype([](T a, T b) -> T { return kOp == kAnd ? a & b : kOp == kOr ? a | b : a ^ b; });
        return &binary<F, T, T, T>;
    });
    const int bytes = bytes_of(t);
    if constexpr (kOp == kNot)
        operands(d, bytes, {bytes});
    else
        operands(d, bytes, {bytes, bytes});
}

void decode_cnot(Decoder& d) {
    const std::string t = d.type();
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        return &unary<decltype([](T a) { return static_cast<T>(a == 0); }), T, T>;
    });
    operands(d, bytes_of(t), {bytes_of(t)});
}

Status lop3(Warp& w, const Op& op, uint32_t mask) {  // 9.7.8.6: bit i of the table for inputs (a, b, c) = i
    const auto *a = w.at<uint32_t>(op.a), *b = w.at<uint32_t>(op.b), *c = w.at<uint32_t>(op.c);
    uint32_t r[kLanes] = {};
    for (int k = 0; k < 8; ++k) {
        if (!(op.imm >> k & 1)) continue;
        const uint32_t na = k & 4 ? 0 : ~0u, nb = k & 2 ? 0 : ~0u, nc = k & 1 ? 0 : ~0u;
        for (int i = 0; i < kLanes; ++i) r[i] |= (a[i] ^ na) & (b[i] ^ nb) & (c[i] ^ nc);
    }
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}
void decode_lop3(Decoder& d) {
    d.type();
    d.expect_operands(5, 5);
    d.op.a = d.source(1, 4), d.op.b = d.source(2, 4), d.op.c = d.source(3, 4);
    d.op.imm = d.immediate(4);
    d.op.d = d.dest(size_t{0}, 4);
    d.op.fn = &lop3;
}

template <bool kLeft>
void decode_shift(Decoder& d) {  // amounts beyond the width are clamped (9.7.8.7)
    const std::string t = d.type();
    d.op.fn = for_integer(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        using F = decltype([](T a, uint32_t n) -> T {
            constexpr uint32_t bits = 8 * sizeof(T);
            if (kLeft) return n < bits ? static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) << n) : T(0);
            return n < bits ? static_cast<T>(a >> n) : static_cast<T>(std::is_signed_v<T> && a < 0 ? -1 : 0);
        });
        return &binary<F, T, T, uint32_t>;
    });
    operands(d, bytes_of(t), {bytes_of(t), 4});
}

void decode_shf(Decoder& d) {  // 9.7.8.8: funnel shift of the pair b:a
    const bool left = d.require_one({"l", "r"}) == "l", wrap = d.require_one({"wrap", "clamp"}) == "wrap";
    d.type();
    using Left = decltype([](uint32_t a, uint32_t b, uint32_t n) -> uint32_t {
        return static_cast<uint32_t>(((uint64_t{b} << 32 | a) << n) >> 32);
    });
    using Right = decltype([](uint32_t a, uint32_t b, uint32_t n) -> uint32_t {
        return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> n);
    });
    using LeftWrap = decltype([](uint32_t a, uint32_t b, uint32_t n) { return Left{}(a, b, n & 31); });
    using LeftClamp = decltype([](uint32_t a, uint32_t b, uint32_t n) { return n >= 32 ? a : Left{}(a, b, n); });
    using RightWrap = decltype([](uint32_t a, uint32_t b, uint32_t n) { return Right{}(a, b, n & 31); });
    using RightClamp = decltype([](uint32_t a, uint32_t b, uint32_t n) { return n >= 32 ? b : Right{}(a, b, n); });
    using U = uint32_t;
    d.op.fn = left ? (wrap ? &ternary<LeftWrap, U, U, U, U> : &ternary<LeftClamp, U, U, U, U>)
                   : (wrap ? &ternary<RightWrap, U, U, U, U> : &ternary<RightClamp, U, U, U, U>);
    operands(d, 4, {4, 4, 4});
}

uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {  // 9.7.9.7, default mode
    const uint64_t pair = uint64_t{b} << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t s = selector >> (4 * i) & 15;
        uint32_t byte = pair >> (8 * (s & 7)) & 0xff;
        if (s & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << (8 * i);
    }
    return r;
}
void decode_prmt(Decoder& d) {
    d.type();
    using F = decltype([](uint32_t a, uint32_t b, uint32_t c) { return permute_bytes(a, b, c); });
    d.op.fn = &ternary<F, uint32_t, uint32_t, uint32_t, uint32_t>;
    operands(d, 4, {4, 4, 4});
}

template <bool kSigned>
void decode_dp4a(Decoder& d) {
    d.type(), d.type();
    using F = decltype([](uint32_t a, uint32_t b, uint32_t c) {
        uint32_t r = c;
        for (int i = 0; i < 32; i += 8)
            r += kSigned ? static_cast<uint32_t>(int8_t(a >> i) * int8_t(b >> i)) : (a >> i & 255) * (b >> i & 255);
        return r;
    });
    d.op.fn = &ternary<F, uint32_t, uint32_t, uint32_t, uint32_t>;
    operands(d, 4, {4, 4, 4});
}
void decode_dp4a_any(Decoder& d) {
    const bool is_signed = d.modifiers.size() == 2 && d.modifiers[0] == "s32" && d.modifiers[1] == "s32";
    if (!is_signed && !(d.modifiers.size() == 2 && d.modifiers[0] == "u32" && d.modifiers[1] == "u32"))
        d.fail("mixed signs");
    is_signed ? decode_dp4a<true>(d) : decode_dp4a<false>(d);
}

// Approximate functions: within the PTX ISA's bounds when computed exactly and rounded once.

template <class F>
struct UnaryFn {
    template <class T>
    T operator()(T a, T, T) const {
        return static_cast<T>(F{}(static_cast<double>(a)));
    }
};

template <class F>
void decode_function(Decoder& d) {
    d.take_one({"approx", "rn"});
    const bool ftz = d.take("ftz");
    const std::string t = d.type();
    d.op.fn = for_float(d, t, [&](auto tag) -> Handler {
        using T = typename decltype(tag)::type;
        using Call = UnaryFn<F>;
        if (ftz) return &unary<decltype([](T a) { return FloatOp<T, Call, true>{}(a, a); }), T, T>;
        return &unary<decltype([](T a) { return FloatOp<T, Call, false>{}(a, a); }), T, T>;
    });
    operands(d, bytes_of(t), {bytes_of(t)});
}
void decode_ex2(Decoder& d) {
    decode_function<decltype([](double x) { return std::exp2(x); })>(d);
}
void decode_lg2(Decoder& d) {
    decode_function<decltype([](double x) { return std::log2(x); })>(d);
}
void decode_rcp(Decoder& d) {
    decode_function<decltype([](double x) { return 1 / x; })>(d);
}
void decode_sqrt(Decoder& d) {
    decode_function<decltype([](double x) { return std::sqrt(x); })>(d);
}
void decode_rsqrt(Decoder& d) {
    decode_function<decltype([](double x) { return 1 / std::sqrt(x); })>(d);
}
void decode_sin(Decoder& d) {
    decode_function<decltype([](double x) { return std::sin(x); })>(d);
}
void decode_cos(Decoder& d) {
    decode_function<decltype([](double x) { return std::cos(x); })>(d);
}
void decode_tanh(Decoder& d) {
    decode_function<decltype([](double x) { return std::tanh(x); })>(d);
}

void decode_copysign(Decoder& d) {  // the sign of a, the rest of b
    const std::string t = d.type();
    using F32 = decltype([](uint32_t a, uint32_t b) { return (a & 0x80000000) | (b & 0x7fffffff); });
    using F64 = decltype([](uint64_t a, uint64_t b) { return (a & 1ull << 63) | (b & ~(1ull << 63)); });
    d.op.fn = t == "f64" ? &binary<F64, uint64_t, uint64_t, uint64_t> : &binary<F32, uint32_t, uint32_t, uint32_t>;
    operands(d, bytes_of(t), {bytes_of(t), bytes_of(t)});
}

// Comparison and selection

template <class T>
double number(T x) {
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>)
        return to_float(x);
    else
        return static_cast<double>(x);
}

enum Comparison { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

template <Comparison kOp, class T>
bool compare(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        if (kOp == kEq) return a == b;
        if (kOp == kNe) return a != b;
        if (kOp == kLt || kOp == kLtu) return a < b;
        if (kOp == kLe || kOp == kLeu) return a <= b;
        if (kOp == kGt || kOp == kGtu) return a > b;
        return a >= b;
    } else {
        const auto x = number(a), y = number(b);
        const bool unordered = x != x || y != y;
        if (kOp == kNum) return !unordered;
        if (kOp == kNan) return unordered;
        if (unordered) return kOp >= kEqu;
        if (kOp == kEq || kOp == kEqu) return x == y;
        if (kOp == kNe || kOp == kNeu) return x != y;
        if (kOp == kLt || kOp == kLtu) return x < y;
        if (kOp == kLe || kOp == kLeu) return x <= y;
        if (kOp == kGt || kOp == kGtu) return x > y;
        return x >= y;
    }
}

enum Combine { kPlain, kCombineAnd, kCombineOr, kCombineXor };

template <Comparison kOp, class T>
Status setp(Warp& w, const Op& op, uint32_t mask) {
    const auto *a = w.at<SlotOf<T>>(op.a), *b = w.at<SlotOf<T>>(op.b);
    uint32_t r = 0;
    for (int i = 0; i < kLanes; ++i)
        r |= static_cast<uint32_t>(compare<kOp, T>(from_slot<T>(a[i]), from_slot<T>(b[i]))) << i;
    uint32_t q = ~r;
    if (op.x != kPlain) {
        const uint32_t other = w.predicate(op.ps, op.ps_negated);
        auto combine = [&](uint32_t v) {
            return op.x == kCombineAnd ? v & other : op.x == kCombineOr ? v | other : v ^ other;
        };
        r = combine(r), q = combine(q);
    }
    w.set_predicate(op.pd, r, mask);
    w.set_predicate(op.pq, q, mask);
    return Status::kNext;
}

template <Comparison kOp, class T, class D>
Status set_value(Warp& w, const Op& op, uint32_t mask) {  // set: all ones or 1.0
    const auto *a = w.at<SlotOf<T>>(op.a), *b = w.at<SlotOf<T>>(op.b);
    uint32_t r[kLanes];
    for (int i = 0; i < kLanes; ++i)
        r[i] =
            compare<kOp, T>(from_slot<T>(a[i]), from_slot<T>(b[i])) ? (std::is_same_v<D, float> ? 0x3f800000 : ~0u) : 0;
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}

template <template <Comparison> class Pick>
Handler for_comparison(Decoder& d, const std::string& type) {
    static const char* names[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                  "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
    int index = -1;
    for (int i = 0; i < 14; ++i)
        if (d.take(names[i])) index = i;
    if (d.take("lo")) index = kLt;
    if (d.take("ls")) index = kLe;
    if (d.take("hi")) index = kGt;
    if (d.take("hs")) index = kGe;
    auto go = [&]<size_t... I>(std::index_sequence<I...>) {
        Handler result = nullptr;
        ((static_cast<int>(I) == index ? void(result = Pick<static_cast<Comparison>(I)>::pick(d, type)) : void()), ...);
        return result;
    };
    Handler result = go(std::make_index_sequence<14>());
    if (!result) d.fail("unknown comparison");
    return result;
}

template <Comparison kOp>
struct PickSetp {
    static Handler pick(Decoder& d, const std::string& t) {
        if (t == "f16") return &setp<kOp, Half>;
        if (t == "bf16") return &setp<kOp, Bfloat>;
        if (t == "f32") return &setp<kOp, float>;
        if (t == "f64") return &setp<kOp, double>;
        return for_integer(d, t, [](auto tag) -> Handler { return &setp<kOp, typename decltype(tag)::type>; });
    }
};
template <Comparison kOp>
struct PickSetU32 {
    static Handler pick(Decoder& d, const std::string& t) {
        if (t == "f32") return &set_value<kOp, float, uint32_t>;
        return for_integer(d, t,
                           [](auto tag) -> Handler { return &set_value<kOp, typename decltype(tag)::type, uint32_t>; });
    }
};

void decode_setp(Decoder& d) {
    const std::string t = d.type();
    d.take("ftz");
    d.op.fn = for_comparison<PickSetp>(d, t);
    const std::string combine = d.take_one({"and", "or", "xor"});
    d.op.x = combine == "and" ? kCombineAnd : combine == "or" ? kCombineOr : combine == "xor" ? kCombineXor : kPlain;
    d.expect_operands(combine.empty() ? 3 : 4, combine.empty() ? 3 : 4);
    d.predicate_dest(0);
    d.op.a = d.source(1, bytes_of(t)), d.op.b = d.source(2, bytes_of(t));
    if (!combine.empty()) d.predicate_source(3);
}

void decode_set(Decoder& d) {
    const std::string dt = d.type(), t = d.type();
    if (dt != "u32" && dt != "s32" && dt != "b32") d.fail("unsupported destination type ." + dt);
    d.take("ftz");
    d.op.fn = for_comparison<PickSetU32>(d, t);
    operands(d, 4, {bytes_of(t), bytes_of(t)});
}

template <class T>
Status select(Warp& w, const Op& op, uint32_t mask) {
    const T *a = w.at<T>(op.a), *b = w.at<T>(op.b);
    const uint32_t p = w.predicate(op.ps, op.ps_negated);
    T r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = p >> i & 1 ? a[i] : b[i];
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}
void decode_selp(Decoder& d) {
    const int bytes = bytes_of(d.type());
    d.expect_operands(4, 4);
    d.op.a = d.source(1, bytes), d.op.b = d.source(2, bytes);
    d.predicate_source(3);
    d.op.d = d.dest(size_t{0}, bytes);
    d.op.fn = bytes == 8 ? &select<uint64_t> : &select<uint32_t>;
}
void decode_slct(Decoder& d) {  // a if c >= 0 else b
    const std::string t = d.type(), ct = d.type();
    d.take("ftz");
    if (bytes_of(t) != 4) d.fail("only 32 bits are supported");
    using Int = decltype([](uint32_t a, uint32_t b, int32_t c) { return c >= 0 ? a : b; });
    using Float = decltype([](uint32_t a, uint32_t b, float c) { return c >= 0 ? a : b; });
    d.op.fn = ct == "s32" ? &ternary<Int, uint32_t, uint32_t, uint32_t, int32_t>
                          : &ternary<Float, uint32_t, uint32_t, uint32_t, float>;
    operands(d, 4, {4, 4, 4});
}

template <class T, int kWhat>
Status test_property(Warp& w, const Op& op, uint32_t mask) {
    const auto* a = w.at<SlotOf<T>>(op.a);
    uint32_t r = 0;
    for (int i = 0; i < kLanes; ++i) {
        const T x = from_slot<T>(a[i]);
        const bool v = kWhat == 0   ? std::isfinite(x)
                       : kWhat == 1 ? std::isinf(x)
                       : kWhat == 2 ? !std::isnan(x)
                       : kWhat == 3 ? std::isnan(x)
                       : kWhat == 4 ? std::isnormal(x)
                                    : std::fpclassify(x) == FP_SUBNORMAL;
        r |= static_cast<uint32_t>(v) << i;
    }
    w.set_predicate(op.pd, r, mask);
    return Status::kNext;
}
template <class T>
Handler test_handler(const std::string& what) {
    static const std::pair<const char*, Handler> all[] = {
        {"finite", &test_property<T, 0>},     {"infinite", &test_property<T, 1>}, {"number", &test_property<T, 2>},
        {"notanumber", &test_property<T, 3>}, {"normal", &test_property<T, 4>},   {"subnormal", &test_property<T, 5>}};
    for (auto& [name, handler] : all)
        if (what == name) return handler;
    return nullptr;
}
void decode_testp(Decoder& d) {
    const std::string what = d.require_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
    const std::string t = d.type();
    d.op.fn = t == "f64" ? test_handler<double>(what) : test_handler<float>(what);
    d.predicate_dest(0);
    d.op.a = d.source(1, bytes_of(t));
}

// mov (9.7.9.3): registers, constants, addresses, special registers, and packing of vectors.

template <class T>
Status move(Warp& w, const Op& op, uint32_t mask) {
    if (sizeof(T) == 4 && w.mma_issued != w.mma_waited && !(op.a & 1) && w.register_mma[op.a / 128] > w.mma_waited) {
        // nvcc copies accumulators between wgmmas in flight; the copy happens when the value is there.
        Warpgroup& group = w.cta->warpgroups[w.index / 4];
        const uint64_t number = w.register_mma[op.a / 128] - 1;
        w.register_mma[op.d / 128] = number + 1;
        if (number >= group.first) {
            group.pending[number - group.first].moves.push_back({w.index % 4, op.d, op.a, mask});
            return Status::kNext;
        }
    }
    if (sizeof(T) == 4 && w.mma_issued != w.mma_waited && w.register_mma[op.d / 128] > w.mma_waited)
        Machine::get().report(
            "wgmma",
            "register of a wgmma in flight overwritten\n  at " + Machine::get().source(op.id) + "\n  by " + name_of(w),
            op.id);
    store_lanes(w.at<T>(op.d), w.at<T>(op.a), mask);
    return Status::kNext;
}

template <class T>
Status move_sum(Warp& w, const Op& op, uint32_t mask) {  // a symbol's address: base (shared) + offset
    const auto* base = op.a == kNoRef ? nullptr : w.at<uint32_t>(op.a);
    T r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = static_cast<T>((base ? base[i] : 0) + op.imm);
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}

template <class T>
Status move_param_address(Warp& w, const Op& op, uint32_t mask) {
    const auto base = reinterpret_cast<Addr>(w.cta->launch->params);
    T r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = static_cast<T>(base + op.imm);
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}

enum ClockKind { kGlobalTimer, kGlobalTimerHigh, kCycles, kCyclesHigh };
template <class T>
Status move_clock(Warp& w, const Op& op, uint32_t mask) {
    const Machine& m = Machine::get();
    uint64_t value = op.x <= kGlobalTimerHigh ? m.time_ns() : m.step + m.skipped_ns;
    if (op.x == kGlobalTimerHigh || op.x == kCyclesHigh) value >>= 32;
    T r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = static_cast<T>(value);
    store_lanes(w.at<T>(op.d), r, mask);
    return Status::kNext;
}

Status pack(Warp& w, const Op& op, uint32_t mask) {  // x parts of y bytes each into one register
    const Ref* parts = &w.program->ext[op.ext];
    uint64_t r[kLanes] = {};
    for (uint32_t k = 0; k < op.x; ++k) {
        const auto* part = w.at<uint32_t>(parts[k]);
        const uint64_t keep = op.y == 4 ? 0xffffffffu : (1u << 8 * op.y) - 1;
        for (int i = 0; i < kLanes; ++i) r[i] |= (part[i] & keep) << (8 * op.y * k);
    }
    if (op.x * op.y == 8) {
        store_lanes(w.at<uint64_t>(op.d), r, mask);
    } else {
        uint32_t narrow[kLanes];
        for (int i = 0; i < kLanes; ++i) narrow[i] = static_cast<uint32_t>(r[i]);
        store_lanes(w.at<uint32_t>(op.d), narrow, mask);
    }
    return Status::kNext;
}

Status unpack(Warp& w, const Op& op, uint32_t mask) {
    const Ref* parts = &w.program->ext[op.ext];
    uint64_t value[kLanes];
    const bool is_wide = op.x * op.y == 8;
    for (int i = 0; i < kLanes; ++i) value[i] = is_wide ? w.at<uint64_t>(op.a)[i] : w.at<uint32_t>(op.a)[i];
    for (uint32_t k = 0; k < op.x; ++k) {
        if (parts[k] == kNoRef) continue;
        uint32_t r[kLanes];
        const uint32_t keep = op.y == 4 ? ~0u : (1u << 8 * op.y) - 1;
        for (int i = 0; i < kLanes; ++i) r[i] = static_cast<uint32_t>(value[i] >> (8 * op.y * k)) & keep;
        store_lanes(w.at<uint32_t>(parts[k]), r, mask);
    }
    return Status::kNext;
}

Status move_predicate(Warp& w, const Op& op, uint32_t mask) {
    w.set_predicate(op.pd, op.ps ? w.predicate(op.ps, op.ps_negated) : op.imm ? ~0u : 0, mask);
    return Status::kNext;
}

void decode_mov(Decoder& d) {
    const std::string t = d.type();
    d.expect_operands(2, 2);
    const Operand &to = d.operand(0), &from = d.operand(1);
    if (t == "pred") {
        d.predicate_dest(0);
        if (from.kind == Operand::kImmediate)
            d.op.imm = from.value;
        else
            d.predicate_source(1);
        d.op.fn = &move_predicate;
        return;
    }
    const int bytes = bytes_of(t);
    if (from.kind == Operand::kVector || to.kind == Operand::kVector) {
        const Operand& vector = from.kind == Operand::kVector ? from : to;
        d.op.x = static_cast<uint32_t>(vector.elements.size());
        d.op.y = bytes / d.op.x;
        if (from.kind == Operand::kVector) {
            d.push_source(from, d.op.y);
            d.op.d = d.dest(to, bytes);
            d.op.fn = &pack;
        } else {
            d.op.a = d.source(from, bytes);
            d.push_dest(to, d.op.y);
            d.op.fn = &unpack;
        }
        return;
    }
    static const std::pair<const char*, ClockKind> clocks[] = {{"%globaltimer", kGlobalTimer},
                                                               {"%globaltimer_lo", kGlobalTimer},
                                                               {"%globaltimer_hi", kGlobalTimerHigh},
                                                               {"%clock", kCycles},
                                                               {"%clock64", kCycles},
                                                               {"%clock_hi", kCyclesHigh}};
    for (auto& [name, kind] : clocks)
        if (from.name == name) {
            d.op.x = kind;
            d.op.d = d.dest(to, bytes);
            d.op.fn = bytes == 8 ? &move_clock<uint64_t> : &move_clock<uint32_t>;
            return;
        }
    if (from.kind == Operand::kSymbol) {
        const auto address = d.address(from);
        d.op.a = address.base;
        d.op.imm = static_cast<uint64_t>(address.offset);
        d.op.d = d.dest(to, bytes);
        if (address.is_entry_param)
            d.op.fn = bytes == 8 ? &move_param_address<uint64_t> : &move_param_address<uint32_t>;
        else
            d.op.fn = bytes == 8 ? &move_sum<uint64_t> : &move_sum<uint32_t>;
        return;
    }
    d.op.a = d.source(from, bytes);
    d.op.d = d.dest(to, bytes);
    d.op.fn = bytes == 8 ? &move<uint64_t> : &move<uint32_t>;
    d.op.flags |= kMmaSafe;
}

}  // namespace

const InstructionTable kAluInstructions = {
    {"add", "9.7.1.1", "integer and floating-point sum; .sat, .ftz, .cc; rounding .rn", decode_add<false>},
    {"sub", "9.7.1.2", "difference, as add", decode_add<true>},
    {"addc", "9.7.2.2", "sum with carry in", [](Decoder& d) { decode_carry<false>(d, true); }},
    {"subc", "9.7.2.4", "difference with borrow in", [](Decoder& d) { decode_carry<true>(d, true); }},
    {"mul", "9.7.1.3", "product: .lo, .hi, .wide, or floating point", decode_mul},
    {"mad", "9.7.1.4", "a * b + c: .lo, .hi, .wide, or floating point", decode_mad},
    {"madc", "9.7.2.6", "a * b + c with carry in", decode_mad_carry<true>},
    {"fma", "9.7.3.6", "fused a * b + c of f32, f64, f16, bf16 and pairs", [](Decoder& d) { decode_fma(d, d.type()); }},
    {"div", "9.7.1.8", "quotient; integer division by zero is unspecified", decode_div<false>},
    {"rem", "9.7.1.9", "remainder", decode_div<true>},
    {"min", "9.7.1.12", "minimum; floating point prefers numbers to NaN unless .NaN", decode_min_max<false>},
    {"max", "9.7.1.13", "maximum, as min", decode_min_max<true>},
    {"abs", "9.7.1.10", "absolute value", decode_sign<kAbs>},
    {"neg", "9.7.1.11", "negation", decode_sign<kNeg>},
    {"popc", "9.7.1.14", "number of one bits", decode_popc},
    {"clz", "9.7.1.15", "number of leading zeros", decode_clz},
    {"bfind", "9.7.1.16", "highest significant bit", decode_bfind},
    {"brev", "9.7.1.18", "bit reversal", decode_brev},
    {"bfe", "9.7.1.19", "bit field extract", decode_bfe},
    {"bfi", "9.7.1.20", "bit field insert", decode_bfi},
    {"bmsk", "9.7.1.22", "bit mask of a position and a length", decode_bmsk},
    {"dp4a", "9.7.1.23", "dot product of four bytes", decode_dp4a_any},
    {"and", "9.7.8.1", "bitwise and, also of predicates", decode_logic<kAnd>},
    {"or", "9.7.8.2", "bitwise or", decode_logic<kOr>},
    {"xor", "9.7.8.3", "bitwise exclusive or", decode_logic<kXor>},
    {"not", "9.7.8.4", "bitwise not", decode_logic<kNot>},
    {"cnot", "9.7.8.5", "1 for zero, else 0", decode_cnot},
    {"lop3", "9.7.8.6", "any function of three bits, from a truth table", decode_lop3},
    {"shl", "9.7.8.7", "shift left, amount clamped", decode_shift<true>},
    {"shr", "9.7.8.8", "shift right, arithmetic for signed types", decode_shift<false>},
    {"shf", "9.7.8.9", "funnel shift", decode_shf},
    {"prmt", "9.7.9.7", "byte permutation (default mode)", decode_prmt},
    {"ex2", "9.7.3.21", "2 ** x", decode_ex2},
    {"lg2", "9.7.3.20", "binary logarithm", decode_lg2},
    {"rcp", "9.7.3.13", "reciprocal", decode_rcp},
    {"sqrt", "9.7.3.15", "square root", decode_sqrt},
    {"rsqrt", "9.7.3.16", "1 / square root", decode_rsqrt},
    {"sin", "9.7.3.18", "sine", decode_sin},
    {"cos", "9.7.3.19", "cosine", decode_cos},
    {"tanh", "9.7.3.22", "hyperbolic tangent", decode_tanh},
    {"copysign", "9.7.3.2", "magnitude of b with the sign of a", decode_copysign},
    {"testp", "9.7.3.1", "class of a floating-point number", decode_testp},
    {"setp", "9.7.6.2", "comparison into predicates, combined with a third", decode_setp},
    {"set", "9.7.6.1", "comparison into a register", decode_set},
    {"selp", "9.7.6.3", "a if the predicate holds, else b", decode_selp},
    {"slct", "9.7.6.4", "a if c >= 0, else b", decode_slct},
    {"mov", "9.7.9.3", "copy; addresses of symbols; special registers; packing and unpacking", decode_mov},
};

}  // namespace moksim
