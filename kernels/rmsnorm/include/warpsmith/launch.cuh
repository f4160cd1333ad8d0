// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Launch arithmetic.
#pragma once

#include <cstdint>

namespace warpsmith {

inline constexpr int kWarpSize = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline constexpr int64_t kMaxBlocksX = (int64_t{1} << 31) - 1;
inline constexpr int64_t kMaxBlocksYZ = 65535;

// Blocks for `work` units of which one block takes `per_block`; the kernel loops over what is left
// past the cap of the x axis.
constexpr unsigned int grid_blocks(int64_t work, int64_t per_block) {
  const int64_t blocks = ceil_div(work, per_block);
  return static_cast<unsigned int>(blocks < kMaxBlocksX ? blocks : kMaxBlocksX);
}

// Blocks along the y axis, one for a row; the kernel loops over the rows past the cap.
constexpr unsigned int row_blocks(int64_t rows) {
  return static_cast<unsigned int>(rows < kMaxBlocksYZ ? rows : kMaxBlocksYZ);
}

}  // namespace warpsmith
