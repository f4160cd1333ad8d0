#include "expect.h"
#include "img2gray_cuda/img2gray_fwd.cuh"

using namespace img2gray;

namespace {

constexpr int kT4Limit = 64 * 1024;

GrayConfig choose(RowLayout layout, int64_t channels, int64_t row, int64_t rows, int element_bytes,
                  int vector_bytes, int limit = kT4Limit) {
  return choose_config({layout, channels, row, rows, element_bytes, vector_bytes}, limit);
}

}  // namespace

int main() {
  const int64_t pixels = int64_t{16} * 2160 * 3840;
  // A tile is 512 bytes of output, a block has eight.
  const GrayConfig dense = choose(RowLayout::kPacked, 3, pixels, 1, 1, 16);
  EXPECT(dense.strategy == Strategy::kPacked3 && dense.access_bytes == 16);
  EXPECT(dense.blocks == (pixels + 4095) / 4096);
  EXPECT(dense.shared_bytes == 8 * 512 * 3);
  for (int element_bytes : {1, 2, 4, 8}) {
    EXPECT(choose(RowLayout::kPacked, 3, 1 << 20, 1, element_bytes, 16).shared_bytes == 12288);
  }

  EXPECT(choose(RowLayout::kPacked, 4, pixels, 1, 1, 16).strategy == Strategy::kPacked4);
  EXPECT(choose(RowLayout::kPlanar, 3, pixels, 1, 2, 16).strategy == Strategy::kPlanar);
  EXPECT(choose(RowLayout::kStrided, 3, pixels, 1, 2, 16).strategy == Strategy::kStrided);

  // Short rows go pixel by pixel, unless there is only one.
  EXPECT(choose(RowLayout::kPlanar, 3, 511, 1000, 1, 16).strategy == Strategy::kStrided);
  EXPECT(choose(RowLayout::kPlanar, 3, 512, 1000, 1, 16).strategy == Strategy::kPlanar);
  EXPECT(choose(RowLayout::kPlanar, 3, 32, 1000, 1, 1).strategy == Strategy::kPlanar);
  EXPECT(choose(RowLayout::kPacked, 3, 5, 1, 1, 16).strategy == Strategy::kPacked3);

  // More tiles than 32 bits count, or too little shared memory: still a launch that works.
  const GrayConfig huge = choose(RowLayout::kPacked, 3, 64, int64_t{1} << 33, 1, 1);
  EXPECT(huge.strategy == Strategy::kStrided && huge.blocks == 2147483647u);
  EXPECT(choose(RowLayout::kPacked, 3, pixels, 1, 1, 16, 8192).strategy == Strategy::kStrided);
  return failures;
}
