// One result per instruction: out[row * n + i] for inputs a[i], b[i], c[i]. PTX ISA 9.7.1, 9.7.2, 9.7.4, 9.7.8, 9.7.9.
#include <cstdint>

#define ROW(expression)         \
    {                           \
        uint32_t r;             \
        expression;             \
        out[row++ * n + i] = r; \
    }
#define ASM3(text) ROW(asm(text " %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)))
#define ASM2(text) ROW(asm(text " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)))
#define ASM1(text) ROW(asm(text " %0, %1;" : "=r"(r) : "r"(a)))

// The order of the rows is that of INTEGER_ROWS in cases.py.
extern "C" __global__ void integers(const uint32_t* as, const uint32_t* bs, const uint32_t* cs, uint32_t* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint32_t a = as[i], b = bs[i], c = cs[i];
    int row = 0;
    ASM2("add.u32")
    ASM2("sub.u32")
    ASM2("mul.lo.s32")
    ASM2("mul.hi.u32")
    ASM2("mul.hi.s32")
    ASM3("mad.lo.u32")
    ASM2("div.u32")
    ASM2("rem.u32")
    ASM2("min.s32")
    ASM2("max.u32")
    ASM1("popc.b32")
    ASM1("clz.b32")
    ASM1("brev.b32")
    ASM1("bfind.u32")
    ASM1("abs.s32")
    ROW(asm("bfe.u32 %0, %1, %2, 7;" : "=r"(r) : "r"(a), "r"(b & 31)))
    ROW(asm("bfe.s32 %0, %1, %2, 9;" : "=r"(r) : "r"(a), "r"(b & 31)))
    ROW(asm("bfi.b32 %0, %1, %2, %3, 5;" : "=r"(r) : "r"(a), "r"(b), "r"(c & 31)))
    ASM2("and.b32")
    ASM2("xor.b32")
    ROW(asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(a), "r"(b), "r"(c)))
    ROW(asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b & 63)))
    ROW(asm("shr.s32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b & 63)))
    ROW(asm("shf.l.wrap.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)))
    ROW(asm("shf.r.clamp.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c & 63)))
    ROW(asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)))
    ROW(r = static_cast<uint32_t>((static_cast<uint64_t>(a) * b + c) >> 17))
    ROW(r = static_cast<uint32_t>(static_cast<int64_t>(static_cast<int32_t>(a)) % 1000003))
    ROW(asm("{.reg .u32 lo; add.cc.u32 lo, %1, %2; addc.u32 %0, %3, 0;}" : "=r"(r) : "r"(a), "r"(b), "r"(c)))
    ROW(asm("{.reg .pred p; setp.lt.s32 p, %1, %2; selp.b32 %0, %1, %3, p;}" : "=r"(r) : "r"(a), "r"(b), "r"(c)))
    ROW(asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, l};}" : "=r"(r) : "r"(a)))
}

// Conversions and floating point; rows as FLOAT_ROWS in cases.py. PTX ISA 9.7.3, 9.7.9.22.
extern "C" __global__ void floats(const float* as, const float* bs, const float* cs, uint32_t* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float a = as[i], b = bs[i], c = cs[i];
    int row = 0;
#define FLOAT3(text) \
    ROW(float f; asm(text " %0, %1, %2, %3;" : "=f"(f) : "f"(a), "f"(b), "f"(c)); r = __float_as_uint(f))
#define FLOAT2(text) ROW(float f; asm(text " %0, %1, %2;" : "=f"(f) : "f"(a), "f"(b)); r = __float_as_uint(f))
#define PACK2(text) ROW(asm(text " %0, %1, %2;" : "=r"(r) : "f"(a), "f"(b)))
#define PACK8(text) ROW(uint16_t h; asm(text " %0, %1, %2;" : "=h"(h) : "f"(a), "f"(b)); r = h)
#define TOINT(text) ROW(asm(text " %0, %1;" : "=r"(r) : "f"(a)))
    FLOAT2("add.f32")
    FLOAT2("mul.f32")
    FLOAT3("fma.rn.f32")
    FLOAT2("div.rn.f32")
    FLOAT2("min.f32")
    FLOAT2("max.NaN.f32")
    ROW(float f; asm("sqrt.rn.f32 %0, %1;" : "=f"(f) : "f"(fabsf(a))); r = __float_as_uint(f))
    PACK2("cvt.rn.bf16x2.f32")
    PACK2("cvt.rz.bf16x2.f32")
    PACK2("cvt.rn.relu.bf16x2.f32")
    PACK2("cvt.rn.f16x2.f32")
    PACK8("cvt.rn.satfinite.e4m3x2.f32")
    PACK8("cvt.rn.satfinite.e5m2x2.f32")
    TOINT("cvt.rni.s32.f32")
    TOINT("cvt.rzi.u32.f32")
    TOINT("cvt.rmi.s32.f32")
    ROW(float f; asm("cvt.rn.f32.s32 %0, %1;" : "=f"(f) : "r"(__float_as_int(a))); r = __float_as_uint(f))
    ROW(float f; asm("cvt.rz.f32.u32 %0, %1;" : "=f"(f) : "r"(__float_as_uint(a))); r = __float_as_uint(f))
    ROW(
        asm("{.reg .b32 x, y, z; cvt.rn.bf16x2.f32 x, %1, %2; cvt.rn.bf16x2.f32 y, %2, %3; cvt.rn.bf16x2.f32 z, %3, %1;"
            " fma.rn.bf16x2 %0, x, y, z;}" : "=r"(r) : "f"(a),
            "f"(b), "f"(c)))
    ROW(asm("{.reg .b16 x; .reg .b32 y; cvt.rn.satfinite.e4m3x2.f32 x, %1, %2; cvt.rn.f16x2.e4m3x2 %0, x;}" : "=r"(
                r) : "f"(a),
            "f"(b)))
}

// Approximations are compared with a tolerance: ex2, rcp, tanh, lg2, rsqrt. PTX ISA 9.7.3.
extern "C" __global__ void approximations(const float* as, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float a = as[i];
    float r;
    asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
    out[i] = r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    out[n + i] = r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
    out[2 * n + i] = r;
    asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(fabsf(a)));
    out[3 * n + i] = r;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(fabsf(a)));
    out[4 * n + i] = r;
}
