// Sizes that the kernels, the launch code and the tests share.
#pragma once

namespace mok {

constexpr int kMaxRanks = 32;
constexpr int kWarpSize = 32;
constexpr int kWarpgroupThreads = 128;

// One GEMM tile of a CTA: 128 rows x 256 columns, 64 deep. The 256 columns of a gate+up tile are 128 gate and the 128
// matching up columns, so gate column j and up column j meet in one thread and SwiGLU needs no exchange. Four stages of
// 48 KB and 32 KB of epilogue staging fill the 227 KB of an SM.
constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kTileDepth = 64;
constexpr int kGateUpColumns = kTileColumns / 2;
constexpr int kStages = 4;

// Two CTAs of a cluster take the two halves of a 256-row block and multicast the weight tile to each other, which
// halves its L2 traffic.
constexpr int kClusterSize = 2;
constexpr int kBlockRows = kTileRows * kClusterSize;

}  // namespace mok
