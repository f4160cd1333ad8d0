// RGB to gray on CUDA: one read, one write, any strides.
//
// A row is a run of pixels that out stores side by side. Warps take tiles of 32 x 16 bytes of output:
//   planar   three coalesced vector loads, one vector store per thread
//   packed   3 channels: the tile is staged in shared memory with coalesced vectors (asynchronously from 8.0 on), each
//            thread then reads the bytes of its own pixels, 48 bytes apart for the next thread: no bank conflicts
//            4 channels: pixels do not straddle 16 bytes, loads and stores are coalesced without staging
//   strided  one pixel per thread, channels read where they lie
// Vectors have the widest power of two that divides every address and stride; the end of a row is done by elements.
#pragma once

#include "img2gray_common/formula.h"
#include "img2gray_common/pixels.h"
#include "warpsmith/check.h"
#include "warpsmith/cp_async.cuh"
#include "warpsmith/launch.cuh"
#include "warpsmith/numeric.cuh"
#include "warpsmith/vec.cuh"

namespace img2gray {

using warpsmith::kWarpSize;
using warpsmith::Vec;

template <typename T>
struct GrayParams {
  const T* image;
  T* out;
  PixelNest nest;  // dim 0 is the row
  int64_t num_rows;
  int64_t channel_stride;
  uint32_t num_tiles;      // tile kernels only: choose_config keeps larger counts away from them
  uint32_t tiles_per_row;  // likewise
  int red_channel;  // 0 or 2; blue is the other
  GrayMath<T> math;
};

inline constexpr int kWarpsPerBlock = 8;
inline constexpr int kBlockThreads = kWarpsPerBlock * kWarpSize;
inline constexpr int kMinBlocks = 4;  // all the threads of a 7.5 multiprocessor

template <typename T>
inline constexpr int kTilePixels = kWarpSize * 16 / static_cast<int>(sizeof(T));

template <typename T>
inline constexpr int kStagedTileBytes = kTilePixels<T> * 3 * static_cast<int>(sizeof(T));

template <typename T, Conversion kConversion>
__device__ __forceinline__ T gray_of(const GrayMath<T>& math, T red, T green, T blue) {
  if constexpr (std::is_integral_v<T>) {
    return integer_gray<T, kConversion>(math, red, green, blue);
  } else {
    using warpsmith::to_compute;
    return warpsmith::from_compute<T>(
        weighted_sum<T>(math, to_compute(red), to_compute(green), to_compute(blue)));
  }
}

// gray[i] of the pixels whose channels, in memory order, are channel(i, 0), channel(i, 1), channel(i, 2).
template <int kCount, typename T, typename Channel>
__device__ __forceinline__ void gray_pixels(const GrayParams<T>& p, const Channel& channel,
                                            T* gray) {
  const bool reversed = p.red_channel != 0;
  const auto evaluate = [&](auto conversion) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const T first = channel(i, 0), second = channel(i, 1), third = channel(i, 2);
      gray[i] = gray_of<T, decltype(conversion)::value>(p.math, reversed ? third : first, second,
                                                        reversed ? first : third);
    }
  };
  using Truncate = std::integral_constant<Conversion, Conversion::kTruncate>;
  using Round = std::integral_constant<Conversion, Conversion::kRound>;
  using FixedPoint = std::integral_constant<Conversion, Conversion::kFixedPoint>;
  if (std::is_same_v<T, uint16_t> && p.math.conversion == Conversion::kFixedPoint) {
    evaluate(FixedPoint{});
  } else if (std::is_integral_v<T> && p.math.conversion == Conversion::kRound) {
    evaluate(Round{});
  } else {
    evaluate(Truncate{});
  }
}

struct RowOffsets {
  int64_t of[kNumOperands];
};

// Index counts rows: 32 bits where they suffice, since 64-bit division is a subroutine.
template <typename Index, typename T>
__device__ __forceinline__ RowOffsets row_offsets(const GrayParams<T>& p, Index row) {
  RowOffsets offsets{{0, 0}};
  for (int dim = 1; dim < p.nest.num_dims; ++dim) {
    const Index size = static_cast<Index>(p.nest.sizes[dim]);
    const int64_t index = row % size;
    row /= size;
    for (int i = 0; i < kNumOperands; ++i) offsets.of[i] += index * p.nest.strides[dim][i];
  }
  return offsets;
}

// The tile of a warp: where it starts and how many pixels it has.
template <typename T>
struct Tile {
  const T* image;
  T* out;
  int pixels;
};

template <typename T>
__device__ __forceinline__ Tile<T> tile_at(const GrayParams<T>& p, uint32_t index) {
  const uint32_t row = index / p.tiles_per_row;
  const RowOffsets offsets = row_offsets(p, row);
  const int64_t first = int64_t{index - row * p.tiles_per_row} * kTilePixels<T>;
  const int64_t left = p.nest.sizes[0] - first;
  return {p.image + offsets.of[kImage] + first * p.nest.strides[0][kImage],
          p.out + offsets.of[kOut] + first,
          static_cast<int>(left < kTilePixels<T> ? left : kTilePixels<T>)};
}

__device__ __forceinline__ uint32_t tile_of_warp() {
  return blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarpSize;
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    planar_kernel(const __grid_constant__ GrayParams<T> p) {
  using V = Vec<T, kBytes>;
  constexpr int kSteps = 16 / kBytes;
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t index = tile_of_warp();
  if (index >= p.num_tiles) return;
  const Tile<T> tile = tile_at(p, index);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int first = (step * kWarpSize + lane) * V::kSize;
    const T* at = tile.image + first;
    if (first + V::kSize <= tile.pixels) {
      const V a = V::load(at), b = V::load(at + p.channel_stride),
              c = V::load(at + 2 * p.channel_stride);
      V gray;
      gray_pixels<V::kSize>(
          p, [&](int i, int k) { return (k == 0 ? a : k == 1 ? b : c).elements[i]; },
          gray.elements);
      gray.store(tile.out + first);
    } else {
      for (int i = first; i < tile.pixels; ++i, ++at) {
        gray_pixels<1>(p, [&](int, int k) { return at[k * p.channel_stride]; }, tile.out + i);
      }
    }
  }
}

// kAsync: 16-byte copies that bypass registers; needs the 8.0 path.
template <typename T, int kBytes, bool kAsync>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    packed3_kernel(const __grid_constant__ GrayParams<T> p) {
  using V = Vec<T, kBytes>;
  constexpr int kSteps = 16 / kBytes;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int lane = threadIdx.x % kWarpSize;
  T* staged = reinterpret_cast<T*>(shared_memory + threadIdx.x / kWarpSize * kStagedTileBytes<T>);
  const uint32_t index = tile_of_warp();
  if (index >= p.num_tiles) return;
  const Tile<T> tile = tile_at(p, index);
  if (tile.pixels == kTilePixels<T>) {
    if constexpr (kAsync) {
#pragma unroll
      for (int i = 0; i < 3 * kSteps; ++i) {
        const int at = (i * kWarpSize + lane) * V::kSize;
        warpsmith::cp_async_16(staged + at, tile.image + at);
      }
      warpsmith::cp_async_wait_all();
    } else {
      V words[3 * kSteps];
#pragma unroll
      for (int i = 0; i < 3 * kSteps; ++i) {
        words[i] = V::load(tile.image + (i * kWarpSize + lane) * V::kSize);
      }
#pragma unroll
      for (int i = 0; i < 3 * kSteps; ++i) {
        words[i].store(staged + (i * kWarpSize + lane) * V::kSize);
      }
    }
  } else {
    const int elements = 3 * tile.pixels;
    const int whole = elements / V::kSize * V::kSize;
    for (int i = lane * V::kSize; i < whole; i += kWarpSize * V::kSize) {
      V::load(tile.image + i).store(staged + i);
    }
    for (int i = whole + lane; i < elements; i += kWarpSize) staged[i] = tile.image[i];
  }
  __syncwarp();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int first = (step * kWarpSize + lane) * V::kSize;
    if (first + V::kSize <= tile.pixels) {
      union {
        V words[3];
        T channels[3 * V::kSize];
      } pixels;
#pragma unroll
      for (int i = 0; i < 3; ++i) pixels.words[i] = V::load(staged + 3 * first + i * V::kSize);
      V gray;
      gray_pixels<V::kSize>(
          p, [&](int i, int k) { return pixels.channels[3 * i + k]; }, gray.elements);
      gray.store(tile.out + first);
    } else {
      for (int i = first; i < tile.pixels; ++i) {
        gray_pixels<1>(p, [&](int, int k) { return staged[3 * i + k]; }, tile.out + i);
      }
    }
  }
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    packed4_kernel(const __grid_constant__ GrayParams<T> p) {
  using V = Vec<T, kBytes>;
  // A group is the fewest whole pixels in whole vectors.
  constexpr int kGroupPixels = V::kSize < 4 ? 1 : V::kSize / 4;
  constexpr int kGroupVectors = 4 * kGroupPixels / V::kSize;
  constexpr int kGroupsPerLane = kTilePixels<T> / kWarpSize / kGroupPixels;
  using Out = Vec<T, kGroupPixels * static_cast<int>(sizeof(T))>;
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t index = tile_of_warp();
  if (index >= p.num_tiles) return;
  const Tile<T> tile = tile_at(p, index);
#pragma unroll
  for (int step = 0; step < kGroupsPerLane; ++step) {
    const int first = (step * kWarpSize + lane) * kGroupPixels;
    const T* at = tile.image + 4 * first;
    if (first + kGroupPixels <= tile.pixels) {
      union {
        V words[kGroupVectors];
        T channels[4 * kGroupPixels];
      } pixels;
#pragma unroll
      for (int i = 0; i < kGroupVectors; ++i) pixels.words[i] = V::load(at + i * V::kSize);
      Out gray;
      gray_pixels<kGroupPixels>(
          p, [&](int i, int k) { return pixels.channels[4 * i + k]; }, gray.elements);
      gray.store(tile.out + first);
    } else {
      for (int i = first; i < tile.pixels; ++i, at += 4) {
        gray_pixels<1>(p, [&](int, int k) { return at[k]; }, tile.out + i);
      }
    }
  }
}

template <typename T, typename Index>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    strided_kernel(const __grid_constant__ GrayParams<T> p) {
  const Index row_length = static_cast<Index>(p.nest.sizes[0]);
  const int64_t num_pixels = p.num_rows * p.nest.sizes[0];
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_pixels; i += step) {
    const Index row = static_cast<Index>(i) / row_length;
    const int64_t column = static_cast<Index>(i) - row * row_length;
    const RowOffsets offsets = row_offsets(p, row);
    const T* at = p.image + offsets.of[kImage] + column * p.nest.strides[0][kImage];
    gray_pixels<1>(p, [&](int, int k) { return at[k * p.channel_stride]; },
                   p.out + offsets.of[kOut] + column * p.nest.strides[0][kOut]);
  }
}

enum class Strategy : int { kPlanar, kPacked3, kPacked3Async, kPacked4, kStrided };

inline constexpr const char* kStrategyNames[] = {"planar", "packed3", "packed3_async", "packed4",
                                                 "strided"};

struct GrayConfig {
  Strategy strategy;
  int access_bytes;
  int shared_bytes;
  unsigned int blocks;
};

struct GrayShape {
  RowLayout layout;
  int64_t channels;
  int64_t row_length;
  int64_t num_rows;
  int element_bytes;
  int vector_bytes;  // the widest that all addresses and strides allow
};

// Pure: sizes, path and limits in, launch out.
inline GrayConfig choose_config(const GrayShape& shape, int arch, int shared_memory_limit) {
  const int tile_pixels = kWarpSize * 16 / shape.element_bytes;
  const int staged_bytes = kWarpsPerBlock * tile_pixels * 3 * shape.element_bytes;
  const int64_t tiles = shape.num_rows * warpsmith::ceil_div(shape.row_length, tile_pixels);
  const unsigned int tile_blocks = warpsmith::grid_blocks(tiles, kWarpsPerBlock);
  // Rows too short to give every lane a vector are walked pixel by pixel across rows.
  const bool short_rows =
      shape.num_rows > 1 && shape.row_length * shape.element_bytes < kWarpSize * shape.vector_bytes;
  const bool tiled = !short_rows && tiles <= INT32_MAX;
  if (tiled && shape.layout == RowLayout::kPlanar) {
    return {Strategy::kPlanar, shape.vector_bytes, 0, tile_blocks};
  }
  if (tiled && shape.layout == RowLayout::kPacked && shape.channels == 4) {
    return {Strategy::kPacked4, shape.vector_bytes, 0, tile_blocks};
  }
  if (tiled && shape.layout == RowLayout::kPacked && staged_bytes <= shared_memory_limit) {
    const bool async = arch >= 80 && shape.vector_bytes == 16;
    return {async ? Strategy::kPacked3Async : Strategy::kPacked3, shape.vector_bytes, staged_bytes,
            tile_blocks};
  }
  return {Strategy::kStrided, shape.element_bytes, 0,
          warpsmith::grid_blocks(shape.num_rows * shape.row_length, kBlockThreads)};
}

template <typename T, int kBytes>
void launch_vectorised(const GrayParams<T>& params, const GrayConfig& config, cudaStream_t stream) {
  switch (config.strategy) {
    case Strategy::kPlanar:
      planar_kernel<T, kBytes><<<config.blocks, kBlockThreads, 0, stream>>>(params);
      break;
    case Strategy::kPacked3:
      packed3_kernel<T, kBytes, false>
          <<<config.blocks, kBlockThreads, config.shared_bytes, stream>>>(params);
      break;
    case Strategy::kPacked3Async:
      if constexpr (kBytes == 16) {
        packed3_kernel<T, kBytes, true>
            <<<config.blocks, kBlockThreads, config.shared_bytes, stream>>>(params);
      }
      break;
    case Strategy::kPacked4:
      packed4_kernel<T, kBytes><<<config.blocks, kBlockThreads, 0, stream>>>(params);
      break;
    case Strategy::kStrided:
      break;
  }
}

template <typename T>
void launch_gray(const GrayParams<T>& params, const GrayConfig& config, cudaStream_t stream) {
  if (config.strategy == Strategy::kStrided) {
    const bool narrow = params.num_rows * params.nest.sizes[0] <= INT32_MAX;
    auto kernel = narrow ? strided_kernel<T, uint32_t> : strided_kernel<T, int64_t>;
    kernel<<<config.blocks, kBlockThreads, 0, stream>>>(params);
  } else {
    switch (config.access_bytes) {
      case 16:
        launch_vectorised<T, 16>(params, config, stream);
        break;
      case 8:
        launch_vectorised<T, 8>(params, config, stream);
        break;
      case 4:
        if constexpr (sizeof(T) <= 4) launch_vectorised<T, 4>(params, config, stream);
        break;
      case 2:
        if constexpr (sizeof(T) <= 2) launch_vectorised<T, 2>(params, config, stream);
        break;
      case 1:
        if constexpr (sizeof(T) <= 1) launch_vectorised<T, 1>(params, config, stream);
        break;
    }
  }
  CUDA_CHECK_LAUNCH();
}

// Instantiated in img2gray_integers.cu and img2gray_floats.cu.
#define IMG2GRAY_LAUNCHER(T) \
  template void launch_gray<T>(const GrayParams<T>&, const GrayConfig&, cudaStream_t)
extern IMG2GRAY_LAUNCHER(uint8_t);
extern IMG2GRAY_LAUNCHER(uint16_t);
extern IMG2GRAY_LAUNCHER(Half);
extern IMG2GRAY_LAUNCHER(BFloat16);
extern IMG2GRAY_LAUNCHER(float);
extern IMG2GRAY_LAUNCHER(double);

}  // namespace img2gray
