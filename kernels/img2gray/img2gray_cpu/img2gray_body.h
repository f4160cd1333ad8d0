// The CPU body, compiled once per instruction set: the including file defines IMG2GRAY_RANGE (the
// entry's name) and IMG2GRAY_ISA (0, 2 or 512), and has included everything this needs. No include
// guard, internal linkage throughout.
//
// A row is cut into blocks that stay in L1: bring the three channels side by side, widen to the
// computing type, evaluate, narrow, store. The loops are plain so that the compiler vectorises them
// for the set at hand; only what it does badly (uint8, fp16) is written with intrinsics.

#if IMG2GRAY_ISA > 0
#include "img2gray_cpu/img2gray_u8.h"
#endif

namespace img2gray {
namespace {

constexpr int kBlock = 256;

// src[i * kChannels + c] -> planes, i < n.
template <typename T, int kChannels>
void deinterleave(const T* src, int n, T* first, T* second, T* third) {
  for (int i = 0; i < n; ++i) {
    first[i] = src[i * kChannels];
    second[i] = src[i * kChannels + 1];
    third[i] = src[i * kChannels + 2];
  }
}

template <typename T>
float widen(T value) {
  return static_cast<float>(value);
}
template <>
float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.x) << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

// The computing type's values of a block: the block itself where nothing has to be widened.
template <typename T>
const compute_t<T>* widen_block(const T* src, int n, compute_t<T>* buffer) {
  if constexpr (std::is_same_v<T, compute_t<T>>) {
    return src;
  } else {
    int i = 0;
#if IMG2GRAY_ISA > 0
    if constexpr (std::is_same_v<T, Half>) {
      for (; i + 8 <= n; i += 8) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
        _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(halves));
      }
    }
#endif
    for (; i < n; ++i) buffer[i] = widen(src[i]);
    return buffer;
  }
}

// One rounding to storage; every NaN is written as the positive quiet NaN without payload.
void narrow_block(const float* src, int n, float* dst) {
  for (int i = 0; i < n; ++i) dst[i] = src[i] == src[i] ? src[i] : __builtin_nanf("");
}
void narrow_block(const double* src, int n, double* dst) {
  for (int i = 0; i < n; ++i) dst[i] = src[i] == src[i] ? src[i] : __builtin_nan("");
}
void narrow_block(const float* src, int n, BFloat16* dst) {
  for (int i = 0; i < n; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, src + i, sizeof(bits));
    bits = src[i] == src[i] ? bits + 0x7fffu + ((bits >> 16) & 1) : 0x7fc00000u;
    dst[i].x = static_cast<uint16_t>(bits >> 16);
  }
}
void narrow_block(const float* src, int n, Half* dst) {
  int i = 0;
#if IMG2GRAY_ISA > 0
  for (; i + 8 <= n; i += 8) {
    const __m256 value = _mm256_loadu_ps(src + i);
    const __m256 quiet = _mm256_blendv_ps(value, _mm256_set1_ps(__builtin_nanf("")),
                                          _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; ++i) dst[i] = Half(src[i] == src[i] ? src[i] : __builtin_nanf(""));
}

template <typename T, bool kRound>
void integer_block(const GrayMath<T>& math, const T* red, const T* green, const T* blue, int n,
                   T* dst) {
  const GrayMath<T> local = math;
  for (int i = 0; i < n; ++i) {
    dst[i] = static_cast<T>(integer_gray<T, kRound>(local, red[i], green[i], blue[i]));
  }
}

void fixed_point_block(const uint16_t* red, const uint16_t* green, const uint16_t* blue, int n,
                       uint16_t* dst) {
  for (int i = 0; i < n; ++i) {
    dst[i] = static_cast<uint16_t>(fixed_point_gray(red[i], green[i], blue[i]));
  }
}

template <typename T>
void gray_block(const GrayMath<T>& math, const T* red, const T* green, const T* blue, int n,
                T* dst) {
  if constexpr (std::is_integral_v<T>) {
    if constexpr (std::is_same_v<T, uint16_t>) {
      if (math.conversion == Conversion::kFixedPoint) {
        return fixed_point_block(red, green, blue, n, dst);
      }
    }
    const auto block =
        math.conversion == Conversion::kRound ? integer_block<T, true> : integer_block<T, false>;
    block(math, red, green, blue, n, dst);
  } else {
    using C = compute_t<T>;
    C buffers[3][kBlock], sums[kBlock];
    const C* r = widen_block(red, n, buffers[0]);
    const C* g = widen_block(green, n, buffers[1]);
    const C* b = widen_block(blue, n, buffers[2]);
    const GrayMath<T> local = math;
    for (int i = 0; i < n; ++i) sums[i] = weighted_sum<T>(local, r[i], g[i], b[i]);
    narrow_block(sums, n, dst);
  }
}

// `n` pixels of one row, starting at `src` and `dst`.
template <typename T>
void gray_row(const GrayJob& job, const GrayMath<T>& math, const T* src, T* dst, int64_t n) {
  const int64_t pixel_stride = job.nest.strides[0][kImage], out_stride = job.nest.strides[0][kOut];
  const int red = job.options.bgr ? 2 : 0;
  int64_t done = 0;
#if IMG2GRAY_ISA > 0
  if constexpr (std::is_same_v<T, uint8_t>) {
    if (job.layout != RowLayout::kStrided) {
      const auto row = job.layout == RowLayout::kPlanar ? byte_row<ByteRow::kPlanar>
                       : job.channels == 3              ? byte_row<ByteRow::kPacked3>
                                                        : byte_row<ByteRow::kPacked4>;
      done = row(math, src, job.channel_stride, red, n, dst);
    }
  }
#endif
  T planes[3][kBlock], grays[kBlock];
  for (; done < n; done += kBlock) {
    const int count = static_cast<int>(n - done < kBlock ? n - done : kBlock);
    const T* channels[3] = {planes[0], planes[1], planes[2]};
    const T* at = src + done * pixel_stride;
    if (job.layout == RowLayout::kPlanar) {
      for (int c = 0; c < 3; ++c) channels[c] = at + c * job.channel_stride;
    } else if (job.layout == RowLayout::kPacked && job.channels == 3) {
      deinterleave<T, 3>(at, count, planes[0], planes[1], planes[2]);
    } else if (job.layout == RowLayout::kPacked) {
      deinterleave<T, 4>(at, count, planes[0], planes[1], planes[2]);
    } else {
      for (int c = 0; c < 3; ++c) {
        const T* channel = at + c * job.channel_stride;
        for (int i = 0; i < count; ++i) planes[c][i] = channel[i * pixel_stride];
      }
    }
    T* grays_at = out_stride == 1 ? dst + done : grays;
    gray_block<T>(math, channels[red], channels[1], channels[2 - red], count, grays_at);
    if (out_stride != 1) {
      for (int i = 0; i < count; ++i) dst[(done + i) * out_stride] = grays[i];
    }
  }
}

template <typename T>
void gray_range(const GrayJob& job, int64_t begin, int64_t end) {
  const Options& options = job.options;
  const GrayMath<T> math = make_math<T>(options.formula, options.weights);
  const int64_t row_length = job.nest.sizes[0];
  while (begin < end) {
    const int64_t column = begin % row_length;
    int64_t row = begin / row_length;
    int64_t offsets[kNumOperands] = {column * job.nest.strides[0][kOut],
                                     column * job.nest.strides[0][kImage]};
    for (int dim = 1; dim < job.nest.num_dims; ++dim) {
      const int64_t index = row % job.nest.sizes[dim];
      row /= job.nest.sizes[dim];
      for (int i = 0; i < kNumOperands; ++i) offsets[i] += index * job.nest.strides[dim][i];
    }
    const int64_t left = row_length - column;
    const int64_t count = left < end - begin ? left : end - begin;
    gray_row<T>(job, math, static_cast<const T*>(job.image) + offsets[kImage],
                static_cast<T*>(job.out) + offsets[kOut], count);
    begin += count;
  }
}

}  // namespace

void IMG2GRAY_RANGE(const GrayJob& job, int64_t begin, int64_t end) {
  switch (job.dtype) {
    case warpsmith::dtype_of<uint8_t>:
      return gray_range<uint8_t>(job, begin, end);
    case warpsmith::dtype_of<uint16_t>:
      return gray_range<uint16_t>(job, begin, end);
    case warpsmith::dtype_of<Half>:
      return gray_range<Half>(job, begin, end);
    case warpsmith::dtype_of<BFloat16>:
      return gray_range<BFloat16>(job, begin, end);
    case warpsmith::dtype_of<float>:
      return gray_range<float>(job, begin, end);
    case warpsmith::dtype_of<double>:
      return gray_range<double>(job, begin, end);
    default:
      return;  // check_image admits no other dtype
  }
}

}  // namespace img2gray
