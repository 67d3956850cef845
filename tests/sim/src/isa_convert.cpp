// Conversions between number formats with exact rounding (PTX ISA 9.7.9.22).
#include <cmath>

#include "isa.h"

namespace moksim {

// Rounds a non-negative number of units (value / unit) to an integer.
static double round_units(double units, Rounding rounding, bool negative) {
    const double low = std::floor(units);
    const double rest = units - low;
    if (rest == 0) return low;
    switch (rounding) {
        case Rounding::kZero:
            return low;
        case Rounding::kDown:
            return negative ? low + 1 : low;
        case Rounding::kUp:
            return negative ? low : low + 1;
        case Rounding::kNearest:
            break;
    }
    if (rest != 0.5) return rest > 0.5 ? low + 1 : low;
    return std::fmod(low, 2) == 0 ? low : low + 1;
}

uint32_t round_to_format(double x, FloatFormat f, Rounding rounding, bool saturate) {
    const int width = f.exponent_bits + f.mantissa_bits;
    const uint32_t sign = (std::signbit(x) ? 1u : 0u) << width;
    const uint32_t exponent_mask = (1u << f.exponent_bits) - 1, mantissa_mask = (1u << f.mantissa_bits) - 1;
    const uint32_t infinity = exponent_mask << f.mantissa_bits;
    // Canonical NaN: 0x7fff for f16 and bf16 (9.7.9.22), 0x7f for the 8-bit formats.
    if (x != x) return (exponent_mask << f.mantissa_bits) | mantissa_mask;
    const uint32_t largest = f.has_infinity ? infinity - 1 : infinity | (mantissa_mask - 1);
    const int bias = (1 << (f.exponent_bits - 1)) - 1;
    const double magnitude = std::fabs(x);
    if (std::isinf(x)) return sign | (saturate || !f.has_infinity ? largest : infinity);
    int exponent = magnitude == 0 ? 1 - bias : std::ilogb(magnitude);
    exponent = std::max(exponent, 1 - bias);
    const double units = round_units(std::ldexp(magnitude, f.mantissa_bits - exponent), rounding, std::signbit(x));
    // Adding the units to the exponent field carries over from mantissa to exponent, and from subnormal to normal.
    const auto field = static_cast<uint32_t>(units) + (static_cast<uint32_t>(exponent + bias - 1) << f.mantissa_bits);
    if (field <= largest) return sign | field;
    if (saturate) return sign | largest;
    const bool toward_zero =
        rounding == Rounding::kZero || rounding == (std::signbit(x) ? Rounding::kUp : Rounding::kDown);
    if (toward_zero) return sign | largest;
    return f.has_infinity ? sign | infinity : (infinity | mantissa_mask);
}

static double from_format(uint32_t bits, FloatFormat f) {
    const uint32_t exponent_mask = (1u << f.exponent_bits) - 1, mantissa_mask = (1u << f.mantissa_bits) - 1;
    const uint32_t exponent = bits >> f.mantissa_bits & exponent_mask, mantissa = bits & mantissa_mask;
    const double sign = bits >> (f.exponent_bits + f.mantissa_bits) & 1 ? -1 : 1;
    const int bias = (1 << (f.exponent_bits - 1)) - 1;
    if (exponent == exponent_mask && (f.has_infinity || mantissa == mantissa_mask))
        return f.has_infinity && mantissa == 0 ? sign * INFINITY : NAN;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
    return sign * std::ldexp(mantissa + (1u << f.mantissa_bits), static_cast<int>(exponent) - bias - f.mantissa_bits);
}

float to_float(Half x) {
    return static_cast<float>(from_format(x.bits, kF16));
}
Half to_half(float x) {
    return {static_cast<uint16_t>(round_to_format(x, kF16, Rounding::kNearest, false))};
}

namespace {

// What Op::x holds for a conversion.
struct Conversion {
    uint32_t rounding : 2, has_rounding : 1, saturates : 1, relu : 1, flushes : 1, to_integral : 1;
};

double round_integral(double x, Rounding r) {
    switch (r) {
        case Rounding::kNearest:
            return std::nearbyint(x);
        case Rounding::kZero:
            return std::trunc(x);
        case Rounding::kDown:
            return std::floor(x);
        case Rounding::kUp:
            return std::ceil(x);
    }
    return x;
}

template <class T>
double value_of(T x) {
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>)
        return to_float(x);
    else
        return static_cast<double>(x);
}

float double_to_float(double x, Rounding r) {
    const auto nearest = static_cast<float>(x);
    if (r == Rounding::kNearest || nearest != nearest || static_cast<double>(nearest) == x) return nearest;
    const bool is_above = static_cast<double>(nearest) > x;
    const bool want_above = r == Rounding::kUp || (r == Rounding::kZero && x < 0);
    if (is_above == want_above) return nearest;
    return std::nextafterf(nearest, want_above ? INFINITY : -INFINITY);
}

template <class D>
D make_float(double x, Conversion c, Rounding r) {
    if (c.saturates) x = x > 0 ? std::min(x, 1.0) : 0;
    if (c.relu && x < 0) x = 0;
    if constexpr (std::is_same_v<D, float>) {
        float y = double_to_float(x, r);
        return c.flushes && std::fabs(y) < 0x1p-126f ? std::copysign(0.f, y) : y;
    } else if constexpr (std::is_same_v<D, double>) {
        return x;
    } else {
        const FloatFormat f = std::is_same_v<D, Half> ? kF16 : kBf16;
        return {static_cast<uint16_t>(round_to_format(x, f, r, false))};
    }
}

// 64-bit integers do not fit a double, so integer sources convert on their own path.
template <class D, class S>
D convert(S x, Conversion c) {
    const auto r = static_cast<Rounding>(c.rounding);
    if constexpr (std::is_integral_v<S> && std::is_integral_v<D>) {
        if (!c.saturates) return static_cast<D>(x);
        using W = __int128;
        return static_cast<D>(std::clamp<W>(x, std::numeric_limits<D>::min(), std::numeric_limits<D>::max()));
    } else if constexpr (std::is_integral_v<S>) {
        if constexpr (sizeof(S) == 8 && std::is_same_v<D, float>) {
            if (r == Rounding::kNearest) return static_cast<float>(x);
        }
        if constexpr (sizeof(S) == 8) {
            // Make the double sticky, so that the second rounding sees what the first one dropped.
            double y = static_cast<double>(x);
            if (r != Rounding::kNearest && static_cast<__int128>(y) != static_cast<__int128>(x))
                y = std::nextafter(y, static_cast<__int128>(y) > static_cast<__int128>(x) ? -INFINITY : INFINITY);
            return make_float<D>(y, c, r);
        }
        return make_float<D>(static_cast<double>(x), c, r);
    } else if constexpr (std::is_integral_v<D>) {  // out of range saturates, NaN gives 0 (9.7.9.22)
        double v = value_of(x);
        if (c.flushes && std::fabs(v) < 0x1p-126) v = 0;
        v = round_integral(v, r);
        if (v != v) return sizeof(D) == 8 ? static_cast<D>(1ull << 63) : D(0);
        if (v < static_cast<double>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
        if (v >= std::ldexp(1.0, 8 * sizeof(D) - std::is_signed_v<D>)) return std::numeric_limits<D>::max();
        return static_cast<D>(v);
    } else {
        double v = value_of(x);
        if (c.flushes && std::is_same_v<S, float> && std::fabs(v) < 0x1p-126) v = std::copysign(0., v);
        if (c.to_integral) v = round_integral(v, r);
        return make_float<D>(v, c, r);
    }
}

// A source register may be wider than its type (9.7.9.22, relaxed operand widths): its low bits count.
template <class D, class S, class Slot>
Status cvt(Warp& w, const Op& op, uint32_t mask) {
    const auto c = __builtin_bit_cast(Conversion, op.x);
    const auto* a = w.at<Slot>(op.a);
    SlotOf<D> r[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        const D value = convert<D, S>(from_slot<S>(static_cast<SlotOf<S>>(a[i])), c);
        if constexpr (std::is_integral_v<D> && std::is_signed_v<D>)
            r[i] = static_cast<SlotOf<D>>(static_cast<std::make_signed_t<SlotOf<D>>>(value));
        else
            r[i] = to_slot<D>(value);
    }
    store_lanes(w.at<SlotOf<D>>(op.d), r, mask);
    return Status::kNext;
}

template <class F>
Handler for_type(Decoder& d, const std::string& t, F f) {
    if (t == "u8" || t == "b8") return f(uint8_t{});
    if (t == "s8") return f(int8_t{});
    if (t == "u16" || t == "b16") return f(uint16_t{});
    if (t == "s16") return f(int16_t{});
    if (t == "u32" || t == "b32") return f(uint32_t{});
    if (t == "s32") return f(int32_t{});
    if (t == "u64" || t == "b64") return f(uint64_t{});
    if (t == "s64") return f(int64_t{});
    if (t == "f16") return f(Half{});
    if (t == "bf16") return f(Bfloat{});
    if (t == "f32") return f(float{});
    if (t == "f64") return f(double{});
    d.fail("unsupported type ." + t);
}

// Packed forms: x2 of 16-bit or 8-bit formats.

FloatFormat format_of(Decoder& d, const std::string& t) {
    if (t == "f16x2") return kF16;
    if (t == "bf16x2") return kBf16;
    if (t == "e4m3x2") return kE4m3;
    if (t == "e5m2x2") return kE5m2;
    d.fail("unsupported packed type ." + t);
}
constexpr FloatFormat kFormats[] = {kF16, kBf16, kE4m3, kE5m2};
uint32_t format_index(const FloatFormat& f) {
    for (uint32_t i = 0; i < 4; ++i)
        if (kFormats[i].exponent_bits == f.exponent_bits && kFormats[i].mantissa_bits == f.mantissa_bits) return i;
    return 0;
}

// d = {a, b}: a in the upper half. Op::y: destination format; Op::imm: bits of one half.
Status pack_floats(Warp& w, const Op& op, uint32_t mask) {
    const auto c = __builtin_bit_cast(Conversion, op.x);
    const auto *a = w.at<float>(op.a), *b = w.at<float>(op.b);
    const FloatFormat f = kFormats[op.y];
    uint32_t r[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        auto half = [&](float v) {
            if (c.relu && !(v > 0) && v == v) v = 0;
            return round_to_format(v, f, static_cast<Rounding>(c.rounding), c.saturates);
        };
        r[i] = half(a[i]) << op.imm | half(b[i]);
    }
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}

Status pack_bf16(Warp& w, const Op& op, uint32_t mask) {  // cvt.rn.bf16x2.f32, the common case
    const auto *a = w.at<float>(op.a), *b = w.at<float>(op.b);
    uint32_t r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = uint32_t{to_bfloat(a[i]).bits} << 16 | to_bfloat(b[i]).bits;
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}

// Between packed formats: Op::y source format, Op::imm destination format.
Status repack(Warp& w, const Op& op, uint32_t mask) {
    const auto c = __builtin_bit_cast(Conversion, op.x);
    const auto* a = w.at<uint32_t>(op.a);
    const FloatFormat from = kFormats[op.y], to = kFormats[op.imm];
    const int from_bits = 1 + from.exponent_bits + from.mantissa_bits;
    const int to_bits = 1 + to.exponent_bits + to.mantissa_bits;
    uint32_t r[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        r[i] = 0;
        for (int k = 0; k < 2; ++k) {
            const double v = from_format(a[i] >> (k * from_bits) & ((1u << from_bits) - 1), from);
            r[i] |= round_to_format(c.relu && v < 0 ? 0 : v, to, Rounding::kNearest, c.saturates) << (k * to_bits);
        }
    }
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}

// ue8m0 (OCP MX scales): 2 ** (bits - 127), 255 is NaN. From f32 with .rz or .rp.
uint32_t to_ue8m0(float x, Rounding r) {
    if (x != x) return 255;
    x = std::fabs(x);
    if (std::isinf(x)) return 254;
    if (x <= 0x1p-127f) return 0;
    const int exponent = std::ilogb(x);
    const bool is_exact = std::ldexp(1.f, exponent) == x;
    return static_cast<uint32_t>(std::clamp(exponent + 127 + (r == Rounding::kUp && !is_exact), 0, 254));
}
Status pack_scales(Warp& w, const Op& op, uint32_t mask) {
    const auto c = __builtin_bit_cast(Conversion, op.x);
    const auto *a = w.at<float>(op.a), *b = w.at<float>(op.b);
    const auto r = static_cast<Rounding>(c.rounding);
    uint32_t result[kLanes];
    for (int i = 0; i < kLanes; ++i) result[i] = to_ue8m0(a[i], r) << 8 | to_ue8m0(b[i], r);
    store_lanes(w.at<uint32_t>(op.d), result, mask);
    return Status::kNext;
}
Status unpack_scales(Warp& w, const Op& op, uint32_t mask) {  // cvt.rn.bf16x2.ue8m0x2
    const auto* a = w.at<uint32_t>(op.a);
    uint32_t r[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        r[i] = 0;
        for (int k = 0; k < 2; ++k) {
            const uint32_t e = a[i] >> (8 * k) & 0xff;
            r[i] |= (e == 255 ? 0x7fff : e ? e << 7 : 0x40) << (16 * k);
        }
    }
    store_lanes(w.at<uint32_t>(op.d), r, mask);
    return Status::kNext;
}

void decode_packed(Decoder& d, Conversion c, const std::string& to, const std::string& from) {
    d.op.x = __builtin_bit_cast(uint32_t, c);
    if (from == "f32") {
        d.expect_operands(3, 3);
        d.op.a = d.source(1, 4), d.op.b = d.source(2, 4);
        if (to == "ue8m0x2") {
            d.op.fn = &pack_scales;
        } else {
            const FloatFormat f = format_of(d, to);
            d.op.y = format_index(f);
            d.op.imm = 1 + f.exponent_bits + f.mantissa_bits;
            const bool is_plain = to == "bf16x2" && !c.relu && !c.saturates && c.rounding == 0;
            d.op.fn = is_plain ? &pack_bf16 : &pack_floats;
        }
    } else {
        d.expect_operands(2, 2);
        d.op.a = d.source(1, 4);
        if (from == "ue8m0x2" && to == "bf16x2") {
            d.op.fn = &unpack_scales;
        } else {
            d.op.y = format_index(format_of(d, from));
            d.op.imm = format_index(format_of(d, to));
            d.op.fn = &repack;
        }
    }
    d.op.d = d.dest(size_t{0}, 4);
}

void decode_cvt(Decoder& d) {
    Conversion c{};
    static const std::pair<const char*, Rounding> roundings[] = {
        {"rn", Rounding::kNearest},  {"rz", Rounding::kZero},  {"rm", Rounding::kDown},  {"rp", Rounding::kUp},
        {"rni", Rounding::kNearest}, {"rzi", Rounding::kZero}, {"rmi", Rounding::kDown}, {"rpi", Rounding::kUp}};
    for (auto& [name, rounding] : roundings)
        if (d.take(name)) {
            c.rounding = static_cast<uint32_t>(rounding);
            c.has_rounding = 1;
            c.to_integral = name[2] == 'i';
        }
    c.saturates = d.take("sat") || d.take("satfinite");
    c.relu = d.take("relu");
    c.flushes = d.take("ftz");
    const std::string to = d.type(), from = d.type();
    if (to.size() > 2 && to.compare(to.size() - 2, 2, "x2") == 0) return decode_packed(d, c, to, from);
    if (to[0] == 'b' && to[1] != 'f') d.fail("untyped conversion");
    const bool wide_source = d.is_wide(d.operand(1)) && type_size(from) < 8;
    const bool wide_dest = d.is_wide(d.operand(0)) && type_size(to) < 8;
    if (wide_dest) d.fail("destination register wider than the type");
    d.op.x = __builtin_bit_cast(uint32_t, c);
    d.op.fn = for_type(d, to, [&](auto dt) {
        return for_type(d, from, [&](auto st) -> Handler {
            using D = decltype(dt);
            using S = decltype(st);
            if constexpr (sizeof(S) < 8)
                if (wide_source) return &cvt<D, S, uint64_t>;
            return &cvt<D, S, SlotOf<S>>;
        });
    });
    d.op.a = d.source(1, wide_source ? 8 : static_cast<int>(type_size(from)));
    d.op.d = d.dest(size_t{0}, static_cast<int>(type_size(to)));
}

}  // namespace

const InstructionTable kConvertInstructions = {
    {"cvt", "9.7.9.22", "between integers, f64, f32, f16, bf16, e4m3x2, e5m2x2 and ue8m0x2, each rounding", decode_cvt},
};

}  // namespace moksim
