// What the CPU bodies get: one call, with pixels numbered in the order of the loop nest.
#pragma once

#include "img2gray_common/request.h"

namespace img2gray {

struct GrayJob {
  warpsmith::ScalarType dtype;
  const void* image;
  void* out;
  PixelNest nest;
  RowLayout layout;
  int64_t channels;
  int64_t channel_stride;
  Options options;
};

// Pixels [begin, end) of the job; one per instruction set, all from img2gray_body.h.
void gray_range_baseline(const GrayJob& job, int64_t begin, int64_t end);
void gray_range_avx2(const GrayJob& job, int64_t begin, int64_t end);
void gray_range_avx512(const GrayJob& job, int64_t begin, int64_t end);

}  // namespace img2gray
