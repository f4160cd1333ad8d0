// RGB to gray on CUDA: one read, one write, any strides.
//
// A row is a run of pixels that out stores side by side. Blocks take tiles of a row, 8 or 16 bytes
// of out for each thread, and one row after another where the grid has fewer:
//   planar   three coalesced vector loads, one vector store per thread
//   packed   3 channels: warps stage their part in shared memory with coalesced vectors, and each
//            thread reads the bytes of its own pixels: full accesses are 24 or 48 bytes apart from
//            the next thread's, without bank conflicts
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

// What tile kernels read comes first, close together: a launch finds its parameters in no cache.
template <typename T>
struct GrayParams {
  const T* channels[3];  // red, green and blue of the first pixel
  T* out;
  int64_t row_length;
  // Rows of dim 1 of the nest lie along y of the grid, all others along z.
  uint32_t rows_along_y;
  // Bits of kTwoTo23, unknown to the compiler, so that byte permutes keep them in a register.
  uint32_t two_to_23;
  int64_t row_strides[2][kNumOperands];
  GrayMath<T> math;
  bool nested_z;   // z counts more than dim 2: see the nest
  const T* image;  // the first pixel
  int64_t num_rows;
  PixelNest nest;  // dim 0 is the row
};

// Bytes that are to be truncated are read as multiples of 1 / kByteScale, with weights multiplied
// by it: powers of two, so that no result changes. The weights are those of named formulas, which
// are small.
inline constexpr float kByteScale = 16777216.0f;

template <typename T>
void scale_weights(GrayMath<T>& math) {
  if (sizeof(T) > 1 || math.conversion != Conversion::kTruncate) return;
  math.red *= kByteScale;
  math.green *= kByteScale;
  math.blue *= kByteScale;
}

// At most. Small blocks spread small images over more multiprocessors.
inline constexpr int kWarpsPerBlock = 4;
inline constexpr int kBlockThreads = kWarpsPerBlock * kWarpSize;
// Registers are capped so that this many warps fit a multiprocessor: uint8 needs the loads of 48
// in flight to reach the copy rate of an H200 (32 warps: 90 %, 48 warps: 98 %). One of 7.5 has room
// for 32.
inline constexpr int kResidentWarps = 48;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kMinBlocks = 32 / kWarpsPerBlock;
#else
inline constexpr int kMinBlocks = kResidentWarps / kWarpsPerBlock;
#endif

// Bytes of out that one thread writes, in one access or several.
__host__ __device__ constexpr int thread_bytes(int access_bytes) {
  return access_bytes == 16 ? 16 : 8;
}

// Of a warp, for packed pixels of three channels.
__host__ __device__ constexpr int staged_bytes(int access_bytes) {
  return 3 * kWarpSize * thread_bytes(access_bytes);
}

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

  // A byte times 1 / kByteScale: that is what its bits mean as a half, two of which one permute
  // takes out of a word.
  __device__ __forceinline__ float scaled_byte_at(int index) const {
    const uint32_t picks = index % 4 < 2 ? 0x4140u : 0x4342u;
    const uint32_t pair = __byte_perm(words[index / 4], 0, picks);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> (index % 2 * 16))));
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

// Of the pixels whose red, green and blue are the elements i * kPixelStep + k * kChannelStep.
template <int kCount, int kPixelStep, int kChannelStep, bool kReversed, typename T, int kBytes,
          int kVectors>
__device__ __forceinline__ auto gray_pixels(const GrayParams<T>& p,
                                            const Pixels<T, kBytes, kVectors>& pixels) {
  Pixels<T, static_cast<int>(sizeof(T)) * kCount, 1> gray;
  constexpr int kRed = kReversed ? 2 * kChannelStep : 0, kBlue = 2 * kChannelStep - kRed;
  const auto pixel = [&](int i, auto channel, auto evaluate) {
    return evaluate(channel(i * kPixelStep + kRed), channel(i * kPixelStep + kChannelStep),
                    channel(i * kPixelStep + kBlue));
  };
  const auto number = [&](int index) { return pixels.number_at(index, p.two_to_23); };
  const auto evaluate_all = [&](auto& results, auto channel, auto evaluate) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) results[i] = pixel(i, channel, evaluate);
  };
  if constexpr (std::is_integral_v<T>) {
    uint32_t bits[kCount];
    if (sizeof(T) == 2 && p.math.conversion == Conversion::kFixedPoint) {
      evaluate_all(bits, [&](int index) { return pixels.bits_at(index, 0); }, fixed_point_gray);
    } else if (p.math.conversion == Conversion::kRound) {
      evaluate_all(bits, number, [&](float r, float g, float b) {
        return integer_gray<T, true>(p.math, r, g, b);
      });
    } else {
      const auto truncated = [&](float r, float g, float b) {
        return integer_gray<T, false>(p.math, r, g, b);
      };
      if constexpr (sizeof(T) == 1 && Pixels<T, kBytes, kVectors>::kWords) {
        evaluate_all(bits, [&](int index) { return pixels.scaled_byte_at(index); }, truncated);
      } else if constexpr (sizeof(T) == 1) {
        evaluate_all(bits, [&](int index) { return number(index) * (1 / kByteScale); }, truncated);
      } else {
        evaluate_all(bits, number, truncated);
      }
    }
    gray.pack(bits);
  } else {
    compute_t<T> sums[kCount];
    evaluate_all(sums, number,
                 [&](auto r, auto g, auto b) { return weighted_sum<T>(p.math, r, g, b); });
    if constexpr (decltype(gray)::kWords) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        gray.words[i / 2] = warpsmith::pack_from_compute<T>(sums[i], sums[i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gray.elements[i] = warpsmith::from_compute<T>(sums[i]);
    }
  }
  return gray;
}

template <typename T>
__device__ __forceinline__ bool is_reversed(const GrayParams<T>& p) {
  return p.channels[0] != p.image;
}

// Pixels with their channels side by side, in the order of the image.
template <int kCount, int kPixelStep, typename T, int kBytes, int kVectors>
__device__ __forceinline__ auto gray_packed(const GrayParams<T>& p,
                                            const Pixels<T, kBytes, kVectors>& pixels) {
  // A branch for all of them: choosing for each would add two selections to each pixel.
  return is_reversed(p) ? gray_pixels<kCount, kPixelStep, 1, true>(p, pixels)
                        : gray_pixels<kCount, kPixelStep, 1, false>(p, pixels);
}

template <typename T>
__device__ __forceinline__ T gray_pixel(const GrayParams<T>& p, T red, T green, T blue) {
  Pixels<T, sizeof(T), 3> pixels;
  pixels.elements[0] = red;
  pixels.elements[1] = green;
  pixels.elements[2] = blue;
  return gray_pixels<1, 3, 1, false>(p, pixels).elements[0];
}

template <typename T>
__device__ __forceinline__ T gray_packed_pixel(const GrayParams<T>& p, const T* at) {
  const bool reversed = is_reversed(p);
  return gray_pixel(p, at[reversed ? 2 : 0], at[1], at[reversed ? 0 : 2]);
}

// Of position `rest` in the dims from `first_dim` on. Index is 32 bits wide where they suffice,
// since 64-bit division is a subroutine.
template <typename Index>
__device__ __forceinline__ void add_nested_offsets(const PixelNest& nest, int first_dim, Index rest,
                                                   int64_t (&offsets)[kNumOperands]) {
#pragma unroll 1
  for (int dim = first_dim; dim < nest.num_dims; ++dim) {
    const Index size = static_cast<Index>(nest.sizes[dim]);
    const int64_t index = rest % size;
    rest /= size;
    for (int i = 0; i < kNumOperands; ++i) offsets[i] += index * nest.strides[dim][i];
  }
}

// What a block does of a row.
template <typename T>
struct Tile {
  int64_t image_offset;
  T* out;
  int pixels;
};

// Computed from blockIdx, blockDim and parameters alone, so once for all threads of a warp.
template <int kThreadPixels, int kPixelStride, typename T>
__device__ __forceinline__ Tile<T> tile_at(const GrayParams<T>& p, uint32_t row) {
  const uint32_t tile_pixels = blockDim.x * kThreadPixels;
  const int64_t first = static_cast<int64_t>(uint64_t{blockIdx.x} * tile_pixels);
  const int64_t left = p.row_length - first;
  int64_t offsets[kNumOperands];
#pragma unroll
  for (int i = 0; i < kNumOperands; ++i) offsets[i] = row * p.row_strides[0][i];
  if (p.nested_z) {
    add_nested_offsets(p.nest, 2, blockIdx.z, offsets);
  } else {
#pragma unroll
    for (int i = 0; i < kNumOperands; ++i) offsets[i] += blockIdx.z * p.row_strides[1][i];
  }
  return {offsets[kImage] + first * kPixelStride, p.out + offsets[kOut] + first,
          static_cast<int>(left < tile_pixels ? left : tile_pixels)};
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    planar_kernel(const __grid_constant__ GrayParams<T> p) {
  using V = Vec<T, kBytes>;
  constexpr int kSteps = thread_bytes(kBytes) / kBytes;
  uint32_t row = blockIdx.y;
  do {
    const Tile<T> tile = tile_at<kSteps * V::kSize, 1>(p, row);
    const T* channels[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) channels[k] = p.channels[k] + tile.image_offset;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int first = (step * blockDim.x + threadIdx.x) * V::kSize;
      if (first + V::kSize <= tile.pixels) {
        Pixels<T, kBytes, 3> pixels;
#pragma unroll
        for (int k = 0; k < 3; ++k) pixels.vectors[k] = V::load(channels[k] + first);
        gray_pixels<V::kSize, 1, V::kSize, false>(p, pixels).vectors[0].store_to_global(tile.out +
                                                                                        first);
      } else {
#pragma unroll 1
        for (int i = first; i < tile.pixels; ++i) {
          tile.out[i] = gray_pixel(p, channels[0][i], channels[1][i], channels[2][i]);
        }
      }
    }
    row += gridDim.y;
  } while (row < p.rows_along_y);
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    packed3_kernel(const __grid_constant__ GrayParams<T> p) {
  using V = Vec<T, kBytes>;
  constexpr int kSteps = thread_bytes(kBytes) / kBytes;
  constexpr int kWarpPixels = kWarpSize * kSteps * V::kSize;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  T* staged = reinterpret_cast<T*>(shared_memory + warp * staged_bytes(kBytes));
  uint32_t row = blockIdx.y;
  do {
    const Tile<T> tile = tile_at<kSteps * V::kSize, 3>(p, row);
    const T* image = p.image + tile.image_offset + warp * 3 * kWarpPixels;
    T* out = tile.out + warp * kWarpPixels;
    const int left = tile.pixels - warp * kWarpPixels;  // for this warp, perhaps none
    if (left >= kWarpPixels) {
      V words[3 * kSteps];
#pragma unroll
      for (int i = 0; i < 3 * kSteps; ++i) {
        words[i] = V::load(image + (i * kWarpSize + lane) * V::kSize);
      }
#pragma unroll
      for (int i = 0; i < 3 * kSteps; ++i) {
        words[i].store(staged + (i * kWarpSize + lane) * V::kSize);
      }
    } else {
      const int elements = 3 * left;
      const int whole = elements / V::kSize * V::kSize;
#pragma unroll 1
      for (int i = lane * V::kSize; i < whole; i += kWarpSize * V::kSize) {
        V::load(image + i).store(staged + i);
      }
#pragma unroll 1
      for (int i = whole + lane; i < elements; i += kWarpSize) staged[i] = image[i];
    }
    __syncwarp();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int first = (step * kWarpSize + lane) * V::kSize;
      if (first + V::kSize <= left) {
        Pixels<T, kBytes, 3> pixels;
#pragma unroll
        for (int i = 0; i < 3; ++i) pixels.vectors[i] = V::load(staged + 3 * first + i * V::kSize);
        gray_packed<V::kSize, 3>(p, pixels).vectors[0].store_to_global(out + first);
      } else {
#pragma unroll 1
        for (int i = first; i < left; ++i) out[i] = gray_packed_pixel(p, staged + 3 * i);
      }
    }
    __syncwarp();  // the next row goes to the same memory
    row += gridDim.y;
  } while (row < p.rows_along_y);
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    packed4_kernel(const __grid_constant__ GrayParams<T> p) {
  using V = Vec<T, kBytes>;
  // A group is the fewest whole pixels in whole vectors.
  constexpr int kGroupPixels = V::kSize < 4 ? 1 : V::kSize / 4;
  constexpr int kGroupVectors = 4 * kGroupPixels / V::kSize;
  constexpr int kThreadPixels = thread_bytes(kBytes) / static_cast<int>(sizeof(T));
  constexpr int kSteps = kThreadPixels / kGroupPixels;
  uint32_t row = blockIdx.y;
  do {
    const Tile<T> tile = tile_at<kThreadPixels, 4>(p, row);
    const T* image = p.image + tile.image_offset;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int first = (step * blockDim.x + threadIdx.x) * kGroupPixels;
      if (first + kGroupPixels <= tile.pixels) {
        Pixels<T, kBytes, kGroupVectors> pixels;
#pragma unroll
        for (int i = 0; i < kGroupVectors; ++i) {
          pixels.vectors[i] = V::load(image + 4 * first + i * V::kSize);
        }
        gray_packed<kGroupPixels, 4>(p, pixels).vectors[0].store_to_global(tile.out + first);
      } else {
#pragma unroll 1
        for (int i = first; i < tile.pixels; ++i) {
          tile.out[i] = gray_packed_pixel(p, image + 4 * i);
        }
      }
    }
    row += gridDim.y;
  } while (row < p.rows_along_y);
}

// Index counts pixels.
template <typename T, typename Index>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    strided_kernel(const __grid_constant__ GrayParams<T> p) {
  const int64_t num_pixels = p.num_rows * p.row_length;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_pixels; i += step) {
    int64_t offsets[kNumOperands] = {0, 0};
    add_nested_offsets(p.nest, 0, static_cast<Index>(i), offsets);
    const int64_t at = offsets[kImage];
    p.out[offsets[kOut]] = gray_pixel(p, p.channels[0][at], p.channels[1][at], p.channels[2][at]);
  }
}

enum class Strategy : int { kPlanar, kPacked3, kPacked4, kStrided };

inline constexpr const char* kStrategyNames[] = {"planar", "packed3", "packed4", "strided"};

struct GrayConfig {
  Strategy strategy;
  int access_bytes;
  int shared_bytes;
  unsigned int threads;
  dim3 blocks;  // of tile kernels: along a row, then rows
};

struct GrayShape {
  RowLayout layout;
  int64_t channels;
  int64_t row_length;
  int64_t num_rows;
  int64_t inner_rows;  // of them in dim 1
  int element_bytes;
  int vector_bytes;  // the widest that all addresses and strides allow
};

struct DeviceLimits {
  int shared_memory;  // bytes of one block
  int multiprocessors;
};

// On an H200, 8 bytes per access are as fast as 16 or faster, by up to 3 % on small images; but
// large ones of bytes, where the work per access counts, take 16.
constexpr int choose_access_bytes(const GrayShape& shape, int multiprocessors) {
  if (shape.vector_bytes < 16) return shape.vector_bytes;
  const int64_t warps_at_once = int64_t{kResidentWarps} * multiprocessors;
  const int64_t warps = shape.num_rows * warpsmith::ceil_div(shape.row_length, kWarpSize * 16);
  return shape.element_bytes == 1 && warps > 2 * warps_at_once ? 16 : 8;
}

// Pure: sizes and limits in, launch out.
inline GrayConfig choose_config(const GrayShape& shape, const DeviceLimits& limits) {
  const int access_bytes = choose_access_bytes(shape, limits.multiprocessors);
  const int warp_pixels = kWarpSize * thread_bytes(access_bytes) / shape.element_bytes;
  const int64_t warps_per_row = warpsmith::ceil_div(shape.row_length, warp_pixels);
  const int warps =
      static_cast<int>(warps_per_row < kWarpsPerBlock ? warps_per_row : kWarpsPerBlock);
  const int64_t blocks = warpsmith::ceil_div(warps_per_row, warps);
  // Rows too short to give every lane a vector are walked pixel by pixel across rows.
  const bool short_rows =
      shape.num_rows > 1 && shape.row_length * shape.element_bytes < kWarpSize * access_bytes;
  const int64_t outer_rows = shape.num_rows / shape.inner_rows;
  const bool rows_fit = shape.inner_rows <= INT32_MAX && outer_rows <= warpsmith::kMaxBlocksYZ;
  const bool tiled = !short_rows && rows_fit && blocks <= warpsmith::kMaxBlocksX;
  const auto in_tiles = [&](Strategy strategy, int shared_bytes) {
    return GrayConfig{
        strategy, access_bytes, shared_bytes, static_cast<unsigned int>(warps * kWarpSize),
        dim3(static_cast<unsigned int>(blocks), warpsmith::row_blocks(shape.inner_rows),
             static_cast<unsigned int>(outer_rows))};
  };
  const int shared_bytes = warps * staged_bytes(access_bytes);
  if (tiled && shape.layout == RowLayout::kPlanar) return in_tiles(Strategy::kPlanar, 0);
  if (tiled && shape.layout == RowLayout::kPacked && shape.channels == 4) {
    return in_tiles(Strategy::kPacked4, 0);
  }
  if (tiled && shape.layout == RowLayout::kPacked && shared_bytes <= limits.shared_memory) {
    return in_tiles(Strategy::kPacked3, shared_bytes);
  }
  return {Strategy::kStrided, shape.element_bytes, 0, kBlockThreads,
          dim3(warpsmith::grid_blocks(shape.num_rows * shape.row_length, kBlockThreads))};
}

template <typename T, int kBytes>
void launch_vectorised(const GrayParams<T>& params, const GrayConfig& config, cudaStream_t stream) {
  switch (config.strategy) {
    case Strategy::kPlanar:
      planar_kernel<T, kBytes><<<config.blocks, config.threads, 0, stream>>>(params);
      break;
    case Strategy::kPacked3:
      packed3_kernel<T, kBytes>
          <<<config.blocks, config.threads, config.shared_bytes, stream>>>(params);
      break;
    case Strategy::kPacked4:
      packed4_kernel<T, kBytes><<<config.blocks, config.threads, 0, stream>>>(params);
      break;
    default:
      STD_TORCH_CHECK(false, "img2gray: no tiled kernel for strategy ",
                      kStrategyNames[static_cast<int>(config.strategy)]);
  }
}

template <typename T>
void launch_gray(const GrayParams<T>& params, const GrayConfig& config, cudaStream_t stream) {
  if (config.strategy == Strategy::kStrided) {
    const bool narrow = params.num_rows * params.row_length <= INT32_MAX;
    auto kernel = narrow ? strided_kernel<T, uint32_t> : strided_kernel<T, int64_t>;
    kernel<<<config.blocks, config.threads, 0, stream>>>(params);
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
