#include "expect.h"
#include "warpsmith/launch.cuh"
#include "warpsmith/vec.cuh"

using warpsmith::ceil_div;
using warpsmith::grid_blocks;
using warpsmith::widest_vector_bytes;

int main() {
  EXPECT(ceil_div(0, 8) == 0 && ceil_div(1, 8) == 1 && ceil_div(8, 8) == 1 && ceil_div(9, 8) == 2);
  EXPECT(ceil_div(int64_t{1} << 40, 3) == ((int64_t{1} << 40) + 2) / 3);
  EXPECT(grid_blocks(1, 256) == 1 && grid_blocks(257, 256) == 2);
  EXPECT(grid_blocks(int64_t{1} << 45, 256) == 2147483647u);

  EXPECT(widest_vector_bytes(0 | 64 | 4096) == 16);
  EXPECT(widest_vector_bytes(32 | 8) == 8);
  EXPECT(widest_vector_bytes(16 | 12) == 4);
  EXPECT(widest_vector_bytes(16 | 6 | 4) == 2);
  EXPECT(widest_vector_bytes(16 | 7) == 1);
  using Quad = warpsmith::Vec<uint16_t, 8>;
  EXPECT(sizeof(Quad) == 8 && Quad::kSize == 4);
  EXPECT(alignof(warpsmith::Vec<uint8_t, 16>) == 16);
  return failures;
}
