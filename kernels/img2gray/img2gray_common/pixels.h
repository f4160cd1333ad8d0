// The pixels of an image as kernels walk them. No torch headers beyond the checks: included by
// every CUDA source.
#pragma once

#include "warpsmith/loop_nest.h"

namespace img2gray {

// Operand order of the loop nest.
enum Operand { kOut = 0, kImage = 1, kNumOperands = 2 };

using PixelNest = warpsmith::LoopNest<kNumOperands>;

// How the pixels of one row lie in memory.
enum class RowLayout : int {
  kPacked,   // channels of a pixel side by side, pixels one after the other
  kPlanar,   // pixels of a channel side by side
  kStrided,  // anything else
};

inline constexpr const char* kRowLayoutNames[] = {"packed", "planar", "strided"};

inline RowLayout row_layout(const PixelNest& nest, int64_t channels, int64_t channel_stride) {
  if (nest.strides[0][kOut] != 1) return RowLayout::kStrided;
  const int64_t pixel_stride = nest.strides[0][kImage];
  if (channel_stride == 1 && pixel_stride == channels) return RowLayout::kPacked;
  if (pixel_stride == 1) return RowLayout::kPlanar;
  return RowLayout::kStrided;
}

}  // namespace img2gray
