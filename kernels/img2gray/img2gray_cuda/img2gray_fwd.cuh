// RGB to gray on CUDA: one read, one write, any strides.
//
// A row is a run of pixels that out stores side by side. Warps take tiles of 32 x 16 bytes of out:
//   planar   three coalesced vector loads, one vector store per thread
//   packed   3 channels: the tile is staged in shared memory with coalesced vectors, each thread
//            then reads the bytes of its own pixels, 48 bytes apart from the next thread's: no
//            bank conflicts
//            4 channels: pixels do not straddle 16 bytes, loads and stores are coalesced as it is
//   strided  one pixel per thread, channels read where they lie
// Vectors have the widest power of two that divides every address and stride; the end of a row is
// done by elements. All architecture paths run the same code: asynchronous copies to shared memory
// gain nothing on an H200.
#pragma once

#include "img2gray_common/formula.h"
#include "img2gray_common/pixels.h"
#include "warpsmith/check.h"
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
  int red_channel;         // 0 or 2; blue is the other
  // Bits of kTwoTo23, unknown to the compiler, so that byte permutes keep them in a register.
  uint32_t two_to_23;
  GrayMath<T> math;
};

inline constexpr int kWarpsPerBlock = 8;
inline constexpr int kBlockThreads = kWarpsPerBlock * kWarpSize;
// Registers are capped so that this many blocks fit: uint8 needs the loads of 48 warps in flight to
// reach the copy rate of an H200 (4 blocks: 90 %, 6 blocks: 98 %). A 7.5 multiprocessor has room
// for 4.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kMinBlocks = 4;
#else
inline constexpr int kMinBlocks = 6;
#endif

template <typename T>
inline constexpr int kTilePixels = kWarpSize * 16 / static_cast<int>(sizeof(T));

template <typename T>
inline constexpr int kStagedTileBytes = kTilePixels<T> * 3 * static_cast<int>(sizeof(T));

// Vectors of pixels in registers. Elements narrower than a word are taken out of words by byte
// permutes.
template <typename T, int kBytes, int kVectors>
union Pixels {
  static constexpr bool kWords = sizeof(T) < 4 && kVectors * kBytes % 4 == 0;
  static constexpr int kPerWord = kWords ? 4 / static_cast<int>(sizeof(T)) : 1;

  Vec<T, kBytes> vectors[kVectors];
  uint32_t words[kWords ? kVectors * kBytes / 4 : 1];
  T elements[kVectors * kBytes / sizeof(T)];

  __device__ __forceinline__ Pixels() {}

  // Element `index`, an unsigned integer, in the low bits of `upper`.
  __device__ __forceinline__ uint32_t bits_at(int index, uint32_t upper) const {
    if constexpr (kWords) {
      const int at = index % kPerWord;
      const uint32_t picks = sizeof(T) == 1 ? 0x7650u + at : (at == 0 ? 0x7610u : 0x7632u);
      return __byte_perm(words[index / kPerWord], upper, picks);
    } else {
      return upper | static_cast<uint32_t>(elements[index]);
    }
  }

  // As a number: an integer is set into the mantissa of 2^23, which is then subtracted: units of
  // full rate in place of conversions.
  __device__ __forceinline__ compute_t<T> number_at(int index, uint32_t two_to_23) const {
    if constexpr (std::is_integral_v<T>) {
      return __uint_as_float(bits_at(index, two_to_23)) - kTwoTo23;
    } else if constexpr (kWords) {
      const unsigned short bits = static_cast<unsigned short>(words[index / 2] >> (index % 2 * 16));
      return warpsmith::to_compute(T(bits, T::from_bits()));
    } else {
      return warpsmith::to_compute(elements[index]);
    }
  }

  // Integers: the low bits of each result.
  template <int kCount>
  __device__ __forceinline__ void pack(const uint32_t (&bits)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += kPerWord) {
      if constexpr (kPerWord == 4) {
        words[i / 4] = __byte_perm(__byte_perm(bits[i], bits[i + 1], 0x0040),
                                   __byte_perm(bits[i + 2], bits[i + 3], 0x0040), 0x5410);
      } else if constexpr (kPerWord == 2) {
        words[i / 2] = __byte_perm(bits[i], bits[i + 1], 0x5410);
      } else {
        elements[i] = static_cast<T>(bits[i]);
      }
    }
  }
};

// Of the pixels whose channel k, in memory order, is element i * kPixelStep + k * kChannelStep.
template <int kCount, int kPixelStep, int kChannelStep, typename T, int kBytes, int kVectors>
__device__ __forceinline__ auto gray_pixels(const GrayParams<T>& p,
                                            const Pixels<T, kBytes, kVectors>& pixels) {
  Pixels<T, static_cast<int>(sizeof(T)) * kCount, 1> gray;
  const bool reversed = p.red_channel != 0;
  const auto pixel = [&](int i, auto channel, auto evaluate) {
    const auto first = channel(i * kPixelStep), second = channel(i * kPixelStep + kChannelStep),
               third = channel(i * kPixelStep + 2 * kChannelStep);
    return evaluate(reversed ? third : first, second, reversed ? first : third);
  };
  const auto number = [&](int index) { return pixels.number_at(index, p.two_to_23); };
  if constexpr (std::is_integral_v<T>) {
    uint32_t bits[kCount];
    const auto all = [&](auto channel, auto evaluate) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits[i] = pixel(i, channel, evaluate);
    };
    if (sizeof(T) == 2 && p.math.conversion == Conversion::kFixedPoint) {
      all([&](int index) { return pixels.bits_at(index, 0); }, fixed_point_gray);
    } else if (p.math.conversion == Conversion::kRound) {
      all(number,
          [&](float r, float g, float b) { return integer_gray<T, true>(p.math, r, g, b); });
    } else {
      all(number,
          [&](float r, float g, float b) { return integer_gray<T, false>(p.math, r, g, b); });
    }
    gray.pack(bits);
  } else {
    using C = compute_t<T>;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gray.elements[i] = warpsmith::from_compute<T>(
          pixel(i, number, [&](C r, C g, C b) { return weighted_sum<T>(p.math, r, g, b); }));
    }
  }
  return gray;
}

template <typename T>
__device__ __forceinline__ T gray_pixel(const GrayParams<T>& p, const T* at,
                                        int64_t channel_stride) {
  Pixels<T, sizeof(T), 3> pixels;
  for (int k = 0; k < 3; ++k) pixels.elements[k] = at[k * channel_stride];
  return gray_pixels<1, 3, 1>(p, pixels).elements[0];
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
      Pixels<T, kBytes, 3> pixels;
#pragma unroll
      for (int k = 0; k < 3; ++k) pixels.vectors[k] = V::load(at + k * p.channel_stride);
      gray_pixels<V::kSize, 1, V::kSize>(p, pixels).vectors[0].store(tile.out + first);
    } else {
      for (int i = first; i < tile.pixels; ++i, ++at) {
        tile.out[i] = gray_pixel(p, at, p.channel_stride);
      }
    }
  }
}

template <typename T, int kBytes>
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
    V words[3 * kSteps];
#pragma unroll
    for (int i = 0; i < 3 * kSteps; ++i) {
      words[i] = V::load(tile.image + (i * kWarpSize + lane) * V::kSize);
    }
#pragma unroll
    for (int i = 0; i < 3 * kSteps; ++i) {
      words[i].store(staged + (i * kWarpSize + lane) * V::kSize);
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
      Pixels<T, kBytes, 3> pixels;
#pragma unroll
      for (int i = 0; i < 3; ++i) pixels.vectors[i] = V::load(staged + 3 * first + i * V::kSize);
      gray_pixels<V::kSize, 3, 1>(p, pixels).vectors[0].store(tile.out + first);
    } else {
      for (int i = first; i < tile.pixels; ++i) {
        tile.out[i] = gray_pixel(p, staged + 3 * i, 1);
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
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t index = tile_of_warp();
  if (index >= p.num_tiles) return;
  const Tile<T> tile = tile_at(p, index);
#pragma unroll
  for (int step = 0; step < kGroupsPerLane; ++step) {
    const int first = (step * kWarpSize + lane) * kGroupPixels;
    const T* at = tile.image + 4 * first;
    if (first + kGroupPixels <= tile.pixels) {
      Pixels<T, kBytes, kGroupVectors> pixels;
#pragma unroll
      for (int i = 0; i < kGroupVectors; ++i) pixels.vectors[i] = V::load(at + i * V::kSize);
      gray_pixels<kGroupPixels, 4, 1>(p, pixels).vectors[0].store(tile.out + first);
    } else {
      for (int i = first; i < tile.pixels; ++i, at += 4) tile.out[i] = gray_pixel(p, at, 1);
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
    p.out[offsets.of[kOut] + column * p.nest.strides[0][kOut]] =
        gray_pixel(p, at, p.channel_stride);
  }
}

enum class Strategy : int { kPlanar, kPacked3, kPacked4, kStrided };

inline constexpr const char* kStrategyNames[] = {"planar", "packed3", "packed4", "strided"};

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

// Pure: sizes and limits in, launch out.
inline GrayConfig choose_config(const GrayShape& shape, int shared_memory_limit) {
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
    return {Strategy::kPacked3, shape.vector_bytes, staged_bytes, tile_blocks};
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
      packed3_kernel<T, kBytes>
          <<<config.blocks, kBlockThreads, config.shared_bytes, stream>>>(params);
      break;
    case Strategy::kPacked4:
      packed4_kernel<T, kBytes><<<config.blocks, kBlockThreads, 0, stream>>>(params);
      break;
    default:
      STD_TORCH_CHECK(false, "img2gray: no tiled kernel for strategy ",
                      kStrategyNames[static_cast<int>(config.strategy)]);
  }
}

template <typename T>
void launch_gray(const GrayParams<T>& params, const GrayConfig& config, cudaStream_t stream) {
  if (config.strategy == Strategy::kStrided) {
    const bool narrow = params.num_rows * params.nest.sizes[0] <= INT32_MAX;
    auto kernel = narrow ? strided_kernel<T, uint32_t> : strided_kernel<T, int64_t>;
    kernel<<<config.blocks, kBlockThreads, 0, stream>>>(params);
  } else {
    bool launched = false;
    const auto launch_if = [&](auto bytes) {
      if constexpr (bytes.value >= static_cast<int>(sizeof(T))) {
        if (config.access_bytes != bytes.value) return;
        launch_vectorised<T, bytes.value>(params, config, stream);
        launched = true;
      }
    };
    launch_if(std::integral_constant<int, 16>{});
    launch_if(std::integral_constant<int, 8>{});
    launch_if(std::integral_constant<int, 4>{});
    launch_if(std::integral_constant<int, 2>{});
    launch_if(std::integral_constant<int, 1>{});
    STD_TORCH_CHECK(launched, "img2gray: no kernel for accesses of ", config.access_bytes,
                    " bytes");
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
