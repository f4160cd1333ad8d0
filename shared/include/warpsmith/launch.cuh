// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Launch arithmetic.
#pragma once

#include <cstdint>

namespace warpsmith {

inline constexpr int kWarpSize = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for `work` units of which one block takes `per_block`; the kernel loops over what is left
// past the cap of the x axis.
constexpr unsigned int grid_blocks(int64_t work, int64_t per_block) {
  const int64_t blocks = ceil_div(work, per_block);
  const int64_t cap = (int64_t{1} << 31) - 1;
  return static_cast<unsigned int>(blocks < cap ? blocks : cap);
}

}  // namespace warpsmith
