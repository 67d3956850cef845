// Matrix instructions: wgmma, mma.sync and the loads and stores of fragments (PTX ISA 9.7.14 and 9.7.15).
#include <cmath>

#include "access.h"
#include "lowering.h"
#include "tensor_map.h"

namespace moksim {
namespace {

enum Input { kBf16Input, kF16Input };

float input_to_float(uint16_t bits, Input type) {
    return type == kBf16Input ? to_float(Bfloat{bits}) : to_float(Half{bits});
}

// Fragment layouts (9.7.14.5.8, 9.7.15.5.1.1): lane l holds rows l / 4 and l / 4 + 8, column pairs 2 * (l % 4).

constexpr int kDepth = 16;

// 16 rows of A as the lanes need them: [half][k][lane % 32] = A[l / 4 + 8 * half][k].
struct RowOperand {
    alignas(64) float values[2][kDepth][kLanes];
    void set(int row, int k, float v) {
        for (int i = 0; i < 4; ++i) values[row / 8][k][row % 8 * 4 + i] = v;
    }
};

// 8 columns of B: [k][parity][lane % 16] = B[k][2 * (l % 4) + parity], the same for every l / 4.
struct ColumnOperand {
    alignas(64) float values[kDepth][2][16];
    void set(int k, int column, float v) {
        for (int i = 0; i < 4; ++i) values[k][column % 2][i * 4 + column / 2] = v;
    }
};

// d[half * 2 + parity][lane] += A * B over the whole depth, in order of k.
void multiply(const RowOperand& a, const ColumnOperand& b, float* const d[4]) {
    for (int half = 0; half < 2; ++half)
        for (int parity = 0; parity < 2; ++parity) {
            float* to = d[half * 2 + parity];
            for (int part = 0; part < kLanes; part += 16) {
                float sum[16];
                for (int i = 0; i < 16; ++i) sum[i] = to[part + i];
                for (int k = 0; k < kDepth; ++k)
                    for (int i = 0; i < 16; ++i)
                        sum[i] = std::fma(a.values[half][k][part + i], b.values[k][parity][i], sum[i]);
                for (int i = 0; i < 16; ++i) to[part + i] = sum[i];
            }
        }
}

// A of 16 rows from four registers of bf16 pairs.
void set_rows_from_registers(RowOperand& a, const uint32_t* const registers[4], Input type, float scale) {
    for (int r = 0; r < 4; ++r)
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < 2; ++i)
                a.set(lane / 4 + 8 * (r % 2), lane % 4 * 2 + 8 * (r / 2) + i,
                      scale * input_to_float(static_cast<uint16_t>(registers[r][lane] >> (16 * i)), type));
}

// Shared-memory matrix descriptors (9.7.15.5.1.2.2)

struct Descriptor {
    explicit Descriptor(uint64_t bits)
        : start((bits & 0x3fff) << 4),
          leading((bits >> 16 & 0x3fff) << 4),
          stride((bits >> 32 & 0x3fff) << 4),
          base_offset(bits >> 49 & 7),
          swizzle(static_cast<int>((4 - (bits >> 62)) & 3)) {}
    uint32_t start, leading, stride, base_offset;
    int swizzle;  // as in TensorMap: 0 none, 1 32B, 2 64B, 3 128B

    // Offset of 16 bytes: `chunk` counts eighths of the contiguous dimension, `line` the other one.
    // The canonical layouts of 9.7.15.5.1.2.1; with swizzle a line of the atom has 16 << swizzle bytes.
    uint32_t offset(bool is_k_major, uint32_t chunk, uint32_t line) const {
        uint32_t linear;
        const uint32_t span = 16u << swizzle, per_span = 1u << swizzle;
        if (is_k_major)
            linear = swizzle ? line / 8 * stride + line % 8 * span + chunk * 16
                             : line / 8 * stride + chunk * leading + line % 8 * 16;
        else
            linear = swizzle ? chunk / per_span * leading + chunk % per_span * 16 + line / 8 * stride + line % 8 * span
                             : chunk * stride + line / 8 * leading + line % 8 * 16;
        return swizzle_address(start + linear, swizzle);
    }
};

struct MmaShape {  // Op::x
    uint32_t n : 9, trans_a : 1, trans_b : 1, has_a_registers : 1, type : 2, negate_a : 1, negate_b : 1;
};

// Calls set(line, k, value) for every element of a matrix of `lines` lines and 16 columns along k.
template <class F>
void read_matrix(Machine& m, Cta& cta, const Op& op, uint64_t bits, int lines, bool is_transposed, Input type,
                 float scale, const Actor& actor, uint8_t access, F set) {
    const Descriptor d(bits);
    const int chunks = is_transposed ? lines / 8 : 2, rows = is_transposed ? kDepth : lines;
    for (int row = 0; row < rows; ++row)
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const uint32_t offset = d.offset(!is_transposed, chunk, row);
            if (offset < kSharedReserved || offset + 16 > cta.shared.size())
                m.fatal("bounds",
                        format("wgmma reads shared+%u, outside of [%u, %zu)\n  at %s", offset, kSharedReserved,
                               cta.shared.size(), m.source(op.id).c_str()),
                        nullptr, nullptr);
            check_access(m, cta.shared_region, offset, 16, access, actor);
            uint16_t values[8];
            memcpy(values, &cta.shared[offset], 16);
            for (int i = 0; i < 8; ++i) {
                const float v = scale * input_to_float(values[i], type);
                if (is_transposed)
                    set(chunk * 8 + i, row, v);
                else
                    set(row, chunk * 8 + i, v);
            }
        }
}

void execute_front(Machine& m, Cta& cta, Warpgroup& group, int group_index) {
    MmaOp mma = std::move(group.pending.front());
    group.pending.pop_front();
    ++group.first;
    const Op& op = *mma.op;
    const auto shape = __builtin_bit_cast(MmaShape, op.x);
    const auto type = static_cast<Input>(shape.type);
    const Actor actor{group.entity, group.clock_base + static_cast<uint32_t>(mma.number) + 1, &mma.order, op.id};
    const float scale_a = shape.negate_a ? -1 : 1, scale_b = shape.negate_b ? -1 : 1;
    static thread_local std::vector<ColumnOperand> columns;
    columns.resize(shape.n / 8);
    read_matrix(m, cta, op, mma.b_descriptor, shape.n, shape.trans_b, type, scale_b, actor, kRead | kAsync,
                [&](int n, int k, float v) { columns[n / 8].set(k, n % 8, v); });
    static thread_local std::vector<RowOperand> rows(4);
    if (shape.has_a_registers) {
        for (int w = 0; w < 4; ++w) {
            const uint32_t* registers[4];
            for (int r = 0; r < 4; ++r) registers[r] = &mma.a_registers[(w * 4 + r) * kLanes];
            set_rows_from_registers(rows[w], registers, type, scale_a);
        }
    } else {
        // Rows that nobody filled give rows that nobody may use: they show as NaN if somebody does.
        read_matrix(m, cta, op, mma.a_descriptor, 64, shape.trans_a, type, scale_a, actor, kRead | kAsync | kAnyContent,
                    [&](int row, int k, float v) { rows[row / 16].set(row % 16, k, v); });
    }
    for (int w = 0; w < 4; ++w) {
        Warp& warp = *cta.warps[group_index * 4 + w];
        const Ref* refs = &warp.program->ext[op.ext];
        for (uint32_t j = 0; j < columns.size(); ++j) {
            float* d[4];
            for (int i = 0; i < 4; ++i) {
                d[i] = warp.at<float>(refs[j * 4 + i]);
                if (!mma.scale_d) std::fill(d[i], d[i] + kLanes, 0.f);
            }
            multiply(rows[w], columns[j], d);
        }
    }
    for (auto& move : mma.moves) {
        Warp& warp = *cta.warps[group_index * 4 + move.warp];
        store_lanes(warp.at<uint32_t>(move.to), warp.at<uint32_t>(move.from), move.mask);
    }
    m.progress();
    m.wake(group.waiters);
}

constexpr uint32_t kAllWarps = 15;

bool is_front_ready(const Warpgroup& group) {
    return !group.pending.empty() && group.pending.front().issued == kAllWarps;
}

// wgmma.mma_async. Further operands: D, then A's registers. Op::a, Op::b: descriptors; Op::ps: scale-d.
Status mma_async(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    Cta& cta = *w.cta;
    const int group_index = w.index / 4;
    if (mask != kAllLanes || cta.warps.size() < static_cast<size_t>(group_index) * 4 + 4)
        m.fatal("wgmma", "needs all lanes of four warps", &w, &op);
    if (!w.has_mma_fence && (m.config.checks & kCheckMma))
        m.report("wgmma", "no wgmma.fence before the first wgmma\n  at " + m.source(op.id) + "\n  by " + name_of(w),
                 op.id);
    Warpgroup& group = cta.warpgroups[group_index];
    const auto shape = __builtin_bit_cast(MmaShape, op.x);
    const uint64_t number = w.mma_issued++;
    const uint64_t a = shape.has_a_registers ? 0 : w.at<uint64_t>(op.a)[0], b = w.at<uint64_t>(op.b)[0];
    const bool scale_d = op.ps ? w.predicate(op.ps, op.ps_negated) & 1 : op.imm;
    if (number == group.first + group.pending.size()) {
        group.pending.emplace_back();
        MmaOp& mma = group.pending.back();
        mma.op = &op, mma.number = number, mma.a_descriptor = a, mma.b_descriptor = b, mma.scale_d = scale_d;
        mma.order = w.order;
        for (uint64_t bits : {a, b})
            if (bits >> 49 & 7) m.fatal("wgmma", "a descriptor with a base offset is not supported", &w, &op);
        if (shape.has_a_registers) mma.a_registers.resize(16 * kLanes);
    }
    MmaOp& mma = group.pending[number - group.first];
    if (mma.op != &op || mma.a_descriptor != a || mma.b_descriptor != b || mma.scale_d != scale_d)
        m.fatal("wgmma", "the warps of a warpgroup issue different wgmmas", &w, &op);
    mma.order.meet(w.order);  // what only some of the warps waited for is not waited for
    w.raise_clock();
    mma.issued |= 1u << w.index % 4;
    const Ref* refs = &w.program->ext[op.ext];
    const uint32_t num_d = shape.n / 2;
    for (uint32_t i = num_d; i < op.num_ext; ++i) {
        if (w.register_mma[refs[i] / 128] > w.mma_waited && (m.config.checks & kCheckMma))
            m.report("wgmma", "A fragment is a register of a wgmma in flight\n  at " + m.source(op.id), op.id);
        memcpy(&mma.a_registers[(w.index % 4 * 4 + i - num_d) * kLanes], w.at<uint32_t>(refs[i]), kLanes * 4);
    }
    for (uint32_t i = 0; i < num_d; ++i) w.register_mma[refs[i] / 128] = number + 1;
    if (mma.issued == kAllWarps) {
        m.add_async(cta, [&m, &cta, &group, group_index] {
            if (is_front_ready(group)) execute_front(m, cta, group, group_index);
        });
        m.wake(group.waiters);
    }
    return Status::kNext;
}

void decode_mma_async(Decoder& d) {
    d.take("sync"), d.take("aligned");
    MmaShape shape{};
    for (uint32_t n = 8; n <= 256; n += 8)
        if (d.take("m64n" + std::to_string(n) + "k16")) shape.n = n;
    if (!shape.n) d.fail("unsupported shape");
    if (!d.take("f32")) d.fail("only f32 accumulators are supported");
    const std::string a_type = d.type(), b_type = d.type();
    if (a_type != b_type || (a_type != "bf16" && a_type != "f16")) d.fail("only bf16 and f16 inputs are supported");
    shape.type = a_type == "bf16" ? kBf16Input : kF16Input;
    if (d.operand(0).elements.size() != shape.n / 2) d.fail("wrong number of accumulators");
    for (auto& e : d.operand(0).elements) {  // read and written
        d.source(e, 4);
        d.ext.push_back(d.dest(e, 4));
    }
    shape.has_a_registers = d.operand(1).kind == Operand::kVector;
    if (shape.has_a_registers)
        d.push_source(d.operand(1), 4);
    else
        d.op.a = d.source(1, 8);
    d.op.b = d.source(2, 8);
    if (d.operand(3).kind == Operand::kImmediate)
        d.op.imm = d.immediate(3);
    else
        d.predicate_source(3);
    shape.negate_a = static_cast<int64_t>(d.immediate(4)) < 0;
    shape.negate_b = static_cast<int64_t>(d.immediate(5)) < 0;
    size_t i = 6;
    if (!shape.has_a_registers) shape.trans_a = d.immediate(i++) & 1;
    shape.trans_b = d.immediate(i++) & 1;
    d.expect_operands(i, i);
    d.op.x = __builtin_bit_cast(uint32_t, shape);
    d.op.flags |= kConverged | kMmaSafe;
    d.op.fn = &mma_async;
}

Status mma_fence(Warp& w, const Op&, uint32_t) {
    w.has_mma_fence = true;
    return Status::kNext;
}

Status mma_commit(Warp& w, const Op&, uint32_t) {
    w.mma_groups.push_back(w.mma_issued);
    return Status::kNext;
}

Status mma_wait(Warp& w, const Op& op, uint32_t) {
    if (w.mma_groups.size() <= op.imm) return Status::kNext;
    Machine& m = Machine::get();
    const int group_index = w.index / 4;
    Warpgroup& group = w.cta->warpgroups[group_index];
    const uint64_t target = w.mma_groups[w.mma_groups.size() - op.imm - 1];
    while (group.first < target) {
        if (!is_front_ready(group)) {
            w.wait = {WaitKind::kMma, 0, 0};
            group.waiters.push_back(&w);
            return Status::kBlock;
        }
        execute_front(m, *w.cta, group, group_index);
    }
    w.mma_groups.erase(w.mma_groups.begin(), w.mma_groups.end() - static_cast<long>(op.imm));
    w.mma_waited = target;
    w.order.seen.raise(group.entity, group.clock_base + static_cast<uint32_t>(target));
    return Status::kNext;
}

void decode_mma_group(Decoder& d, Handler fn) {
    d.take("sync"), d.take("aligned");
    d.op.flags |= kConverged | kMmaSafe;
    d.op.fn = fn;
}

// ldmatrix and stmatrix (9.7.14.5.15, 9.7.14.5.16): 8x8 matrices of 16 bits; lane l addresses row l % 8 of matrix l
// / 8.

template <bool kStore>
Status move_matrices(Warp& w, const Op& op, uint32_t mask) {
    Machine& m = Machine::get();
    if (mask != kAllLanes) m.fatal("barrier", "needs all lanes of the warp", &w, &op);
    const uint32_t count = op.x & 7;
    const bool is_transposed = op.x & 8;
    const Ref* refs = &w.program->ext[op.ext];
    for (uint32_t matrix = 0; matrix < count; ++matrix) {
        Place rows[8];
        for (int r = 0; r < 8; ++r) {
            const int lane = static_cast<int>(matrix) * 8 + r;
            const uint64_t base = op.a == kNoRef ? 0 : op.y ? w.at<uint64_t>(op.a)[lane] : w.at<uint32_t>(op.a)[lane];
            rows[r] = resolve(w, op, kSharedSpace, static_cast<uint32_t>(base + op.imm), 16, 16, kStore);
            check_access(m, *rows[r].region, rows[r].offset, 16, kStore ? kWrite : kRead, w.actor(op));
        }
        auto* lanes = w.at<uint32_t>(refs[matrix]);
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < 2; ++i) {
                const int row = is_transposed ? lane % 4 * 2 + i : lane / 4;
                const int column = is_transposed ? lane / 4 : lane % 4 * 2 + i;
                uint8_t* at = rows[row].host + column * 2;
                if (kStore) {
                    const auto v = static_cast<uint16_t>(lanes[lane] >> (16 * i));
                    memcpy(at, &v, 2);
                } else {
                    uint16_t v;
                    memcpy(&v, at, 2);
                    lanes[lane] = i ? (lanes[lane] & 0xffff) | uint32_t{v} << 16 : v;
                }
            }
    }
    if (kStore) m.progress();
    return Status::kNext;
}

template <bool kStore>
void decode_matrix(Decoder& d) {
    d.take("sync"), d.take("aligned");
    d.require_one({"m8n8"});
    const std::string count = d.require_one({"x1", "x2", "x4"});
    d.op.x = static_cast<uint32_t>(count[1] - '0') | (d.take("trans") ? 8 : 0);
    d.take_one({"shared", "shared::cta"});
    d.require_one({"b16"});
    const size_t address_index = kStore ? 0 : 1;
    const auto address = d.address(d.operand(address_index));
    d.op.a = address.base;
    d.op.imm = static_cast<uint64_t>(address.offset);
    d.op.y = address.is_wide;
    if (kStore)
        d.push_source(d.operand(1), 4);
    else
        d.push_dest(d.operand(0), 4);
    d.op.flags |= kConverged;
    d.op.fn = &move_matrices<kStore>;
}

// mma.sync.m16n8k16 with f32 accumulators: further operands D(4), A(4), B(2), C(4).
Status mma_sync(Warp& w, const Op& op, uint32_t mask) {
    if (mask != kAllLanes) Machine::get().fatal("barrier", "needs all lanes of the warp", &w, &op);
    const Ref* refs = &w.program->ext[op.ext];
    const auto type = static_cast<Input>(op.x);
    RowOperand a;
    ColumnOperand b;
    const uint32_t* registers[4];
    for (int r = 0; r < 4; ++r) registers[r] = w.at<uint32_t>(refs[4 + r]);
    set_rows_from_registers(a, registers, type, 1);
    for (int r = 0; r < 2; ++r)
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < 2; ++i)
                b.set(lane % 4 * 2 + 8 * r + i, lane / 4,
                      input_to_float(static_cast<uint16_t>(w.at<uint32_t>(refs[8 + r])[lane] >> (16 * i)), type));
    float sums[4][kLanes];
    float* d[4];
    for (int i = 0; i < 4; ++i) {
        memcpy(sums[i], w.at<float>(refs[10 + i]), sizeof sums[i]);
        d[i] = sums[i];
    }
    multiply(a, b, d);
    for (int i = 0; i < 4; ++i) memcpy(w.at<float>(refs[i]), sums[i], sizeof sums[i]);
    return Status::kNext;
}

void decode_mma_sync(Decoder& d) {
    d.take("sync"), d.take("aligned");
    d.require_one({"m16n8k16"});
    d.require_one({"row"}), d.require_one({"col"});
    d.require_one({"f32"});
    const std::string type = d.type();
    if (!d.take(type) || !d.take("f32") || (type != "bf16" && type != "f16")) d.fail("unsupported types");
    d.op.x = type == "bf16" ? kBf16Input : kF16Input;
    d.push_dest(d.operand(0), 4);
    for (size_t i = 1; i < 4; ++i) d.push_source(d.operand(i), 4);
    d.op.flags |= kConverged;
    d.op.fn = &mma_sync;
}

}  // namespace

const InstructionTable kMmaInstructions = {
    {"wgmma.mma_async", "9.7.15.5.2", "m64nNk16 of bf16 or f16 into f32; A from registers or a descriptor",
     decode_mma_async},
    {"wgmma.fence", "9.7.15.7.1", "orders registers; needed before the first wgmma",
     [](Decoder& d) { decode_mma_group(d, &mma_fence); }},
    {"wgmma.commit_group", "9.7.15.7.2", "closes a group", [](Decoder& d) { decode_mma_group(d, &mma_commit); }},
    {"wgmma.wait_group", "9.7.15.7.3", "waits for all but the last n groups",
     [](Decoder& d) {
         decode_mma_group(d, &mma_wait);
         d.op.imm = d.immediate(0);
         for (auto& name : d.function.mma_registers()) {
             Operand o;
             o.kind = Operand::kRegister;
             o.name = name;
             d.source(o, 4);
         }
     }},
    {"ldmatrix", "9.7.14.5.15", "8x8 matrices of 16 bits from shared memory; .trans", decode_matrix<false>},
    {"stmatrix", "9.7.14.5.16", "8x8 matrices of 16 bits into shared memory; .trans", decode_matrix<true>},
    {"mma", "9.7.14.5.14", "m16n8k16 of bf16 or f16 into f32 (.sync)", decode_mma_sync},
};

}  // namespace moksim
