// The gray formulas as data, and the one expression that evaluates them on the host and on the
// device.
//
// Floating point: y = fma(B, wb, fma(G, wg, R * wr)), in fp32 for fp16, bf16 and fp32, in fp64 for
// fp64, with one rounding to storage.
//
// Integers: y = fma(B, wb, fma(G, wg, fma(R, wr, bias))) in fp32, then truncated, or rounded half
// to even, and saturated; or (R wr + G wg + B wb + 2^14) >> 15 in 32-bit integers.
//
// For uint8 the fixed-point formulas of Pillow and OpenCV are of the first kind: sums below 2^24
// are exact in fp32, so weights / 2^shift with bias 1/2 truncate to the very same bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "warpsmith/dispatch.h"

#if defined(__CUDACC__)
#define IMG2GRAY_INLINE __host__ __device__ __forceinline__
#else
#define IMG2GRAY_INLINE inline __attribute__((always_inline))
#endif

namespace img2gray {

using warpsmith::BFloat16;
using warpsmith::Half;

// How the op's `formula` argument counts; the last one takes the weights of the call.
enum class Formula : int64_t { kBt601 = 0, kBt709 = 1, kPillow = 2, kOpenCv = 3, kCustom = 4 };

struct Weights {
  double red, green, blue;
};
inline constexpr Weights kNamedWeights[] = {
    {0.2989, 0.587, 0.114},
    {0.2126, 0.7152, 0.0722},
    {0.299, 0.587, 0.114},
    {0.299, 0.587, 0.114},
};

enum class Conversion : int { kTruncate, kRound, kFixedPoint };

template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

struct FixedPoint {
  uint32_t red, green, blue;
  int shift;
};
inline constexpr FixedPoint kOpenCvWeights{9798, 19235, 3735, 15};
inline constexpr FixedPoint kPillowWeights{19595, 38470, 7471, 16};

template <typename T>
struct GrayMath {
  compute_t<T> red, green, blue;
  compute_t<T> bias;      // integers only
  Conversion conversion;  // integers only
};

template <typename T>
GrayMath<T> make_math(Formula formula, const Weights& custom) {
  using C = compute_t<T>;
  const Weights& weights =
      formula == Formula::kCustom ? custom : kNamedWeights[static_cast<int>(formula)];
  GrayMath<T> math{static_cast<C>(weights.red), static_cast<C>(weights.green),
                   static_cast<C>(weights.blue), C(0),
                   formula == Formula::kBt601 ? Conversion::kTruncate : Conversion::kRound};
  if (std::is_integral_v<T> && (formula == Formula::kPillow || formula == Formula::kOpenCv)) {
    const FixedPoint& fixed = formula == Formula::kPillow ? kPillowWeights : kOpenCvWeights;
    const C scale = C(1) / static_cast<C>(1 << fixed.shift);
    math = {fixed.red * scale, fixed.green * scale, fixed.blue * scale, C(0.5),
            sizeof(T) == 1 ? Conversion::kTruncate : Conversion::kFixedPoint};
  }
  return math;
}

IMG2GRAY_INLINE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

IMG2GRAY_INLINE double fused_multiply_add(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

template <typename T>
IMG2GRAY_INLINE compute_t<T> weighted_sum(const GrayMath<T>& math, compute_t<T> red,
                                          compute_t<T> green, compute_t<T> blue) {
  const compute_t<T> first =
      std::is_integral_v<T> ? fused_multiply_add(red, math.red, math.bias) : red * math.red;
  return fused_multiply_add(blue, math.blue, fused_multiply_add(green, math.green, first));
}

// Sums of integer pixels can be infinite, never NaN.
template <typename T>
IMG2GRAY_INLINE float saturate(float value) {
  constexpr float kMax = sizeof(T) == 1 ? 255.0f : 65535.0f;
  const float positive = value > 0.0f ? value : 0.0f;
  return positive < kMax ? positive : kMax;
}

// Added to a number in [0, 2^23), 2^23 leaves no fraction bits, and the integer in the low bits of
// the sum.
inline constexpr float kTwoTo23 = 8388608.0f;

// 0 <= value < 2^16, truncated or rounded half to even, in the low 16 bits.
template <bool kRound>
IMG2GRAY_INLINE uint32_t float_to_integer(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(kRound ? __fadd_rn(value, kTwoTo23) : __fadd_rz(value, kTwoTo23));
#else
  return static_cast<uint32_t>(
      static_cast<int32_t>(kRound ? (value + kTwoTo23) - kTwoTo23 : value));
#endif
}

// An integer pixel, in the low bits, from its channels as floats. The formulas that truncate have
// positive weights with a sum of at most 1: nothing to saturate.
template <typename T, bool kRound>
IMG2GRAY_INLINE uint32_t integer_gray(const GrayMath<T>& math, float red, float green, float blue) {
  const float sum = weighted_sum<T>(math, red, green, blue);
  return float_to_integer<kRound>(kRound ? saturate<T>(sum) : sum);
}

// OpenCV's integers; only uint16 needs them, whose sums stay below 2^32.
IMG2GRAY_INLINE uint32_t fixed_point_gray(uint32_t red, uint32_t green, uint32_t blue) {
  constexpr FixedPoint kFixed = kOpenCvWeights;
  const uint32_t sum = red * kFixed.red + green * kFixed.green + blue * kFixed.blue;
  return (sum + (1u << (kFixed.shift - 1))) >> kFixed.shift;
}

}  // namespace img2gray
