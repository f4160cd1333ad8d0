#include "expect.h"
#include "img2gray_cuda/img2gray_fwd.cuh"

using namespace img2gray;

namespace {

constexpr DeviceLimits kH200{227 * 1024, 132}, kT4{64 * 1024, 40};

GrayConfig choose(RowLayout layout, int64_t channels, int64_t row, int64_t rows, int element_bytes,
                  int vector_bytes, DeviceLimits limits = kH200) {
  return choose_config({layout, channels, row, rows, rows, element_bytes, vector_bytes}, limits);
}

GrayConfig choose_rows(int64_t inner, int64_t outer) {
  return choose_config({RowLayout::kPlanar, 3, 4096, inner * outer, inner, 2, 16}, kH200);
}

}  // namespace

int main() {
  const int64_t pixels = int64_t{16} * 2160 * 3840;
  // A tile is 512 bytes of output, a block has four.
  const GrayConfig dense = choose(RowLayout::kPacked, 3, pixels, 1, 1, 16);
  EXPECT(dense.strategy == Strategy::kPacked3 && dense.access_bytes == 16);
  EXPECT(dense.blocks.x == (pixels + 2047) / 2048 && dense.threads == 128 && dense.blocks.y == 1);
  EXPECT(dense.shared_bytes == 4 * 512 * 3);

  // Images of bytes too small to fill the GPU twice, and wider elements, take 8 bytes per access.
  const int64_t twice = int64_t{2} * 48 * 132 * 512;
  for (RowLayout layout : {RowLayout::kPacked, RowLayout::kPlanar}) {
    EXPECT(choose(layout, 3, twice, 1, 1, 16).access_bytes == 8);
    EXPECT(choose(layout, 3, twice + 1, 1, 1, 16).access_bytes == 16);
    EXPECT(choose(layout, 3, twice, 1, 1, 16, kT4).access_bytes == 16);
    EXPECT(choose(layout, 3, pixels, 1, 1, 4).access_bytes == 4);
  }
  for (int element_bytes : {2, 4, 8}) {
    const GrayConfig wide = choose(RowLayout::kPacked, 3, pixels, 1, element_bytes, 16);
    EXPECT(wide.access_bytes == 8 && wide.shared_bytes == 4 * 256 * 3);
    EXPECT(wide.blocks.x == (pixels * element_bytes + 1023) / 1024);
  }

  EXPECT(choose(RowLayout::kPacked, 4, pixels, 1, 1, 16).strategy == Strategy::kPacked4);
  EXPECT(choose(RowLayout::kPlanar, 3, pixels, 1, 2, 16).strategy == Strategy::kPlanar);
  EXPECT(choose(RowLayout::kStrided, 3, pixels, 1, 2, 16).strategy == Strategy::kStrided);

  // Short rows go pixel by pixel, unless there is only one.
  EXPECT(choose(RowLayout::kPlanar, 3, 255, 1000, 1, 16).strategy == Strategy::kStrided);
  EXPECT(choose(RowLayout::kPlanar, 3, 256, 1000, 1, 16).strategy == Strategy::kPlanar);
  EXPECT(choose(RowLayout::kPlanar, 3, 32, 1000, 1, 1).strategy == Strategy::kPlanar);
  EXPECT(choose(RowLayout::kPacked, 3, 5, 1, 1, 16).strategy == Strategy::kPacked3);

  // Blocks are as wide as the rows need, and walk over the rows that the grid has no blocks for.
  const GrayConfig narrow = choose(RowLayout::kPlanar, 3, 600, 70000, 1, 16);
  EXPECT(narrow.strategy == Strategy::kPlanar && narrow.threads == 64);
  EXPECT(narrow.blocks.x == 1 && narrow.blocks.y == 65535 && narrow.blocks.z == 1);
  const GrayConfig wide_rows = choose(RowLayout::kPlanar, 3, 2100, 10, 1, 16);
  EXPECT(wide_rows.threads == 128 && wide_rows.blocks.x == 3 && wide_rows.blocks.y == 10);

  // Rows of further dims lie along z; more than z holds go pixel by pixel.
  const GrayConfig crops = choose_rows(480, 8);
  EXPECT(crops.strategy == Strategy::kPlanar && crops.blocks.y == 480 && crops.blocks.z == 8);
  EXPECT(choose_rows(2, 65535).strategy == Strategy::kPlanar);
  EXPECT(choose_rows(2, 65536).strategy == Strategy::kStrided);

  // More rows or blocks than 32 bits count, or too little shared memory: still a launch that works.
  const GrayConfig huge = choose(RowLayout::kPacked, 3, 64, int64_t{1} << 33, 1, 1);
  EXPECT(huge.strategy == Strategy::kStrided && huge.blocks.x == 2147483647u);
  EXPECT(choose(RowLayout::kPacked, 3, pixels, 1, 1, 16, {4096, 132}).strategy ==
         Strategy::kStrided);
  return failures;
}
