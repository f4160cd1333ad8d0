// The gray formulas as data and the one expression that evaluates them, on the host and on the device.
//
//   floating point   y = fma(B, wb, fma(G, wg, R * wr)), fp32 for fp16/bf16/fp32, fp64 for fp64, one rounding to storage
//   integers         y = fma(B, wb, fma(G, wg, fma(R, wr, bias))) in fp32, then truncated or rounded half to even and
//                    saturated; or (R wr + G wg + B wb + 2^14) >> 15 in 32-bit integers
//
// For uint8 the fixed-point formulas of Pillow and OpenCV are the first kind: sums below 2^24 are exact in fp32, so
// weights / 2^shift with bias 1/2 truncate to the very same bytes.
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

// How the op's `formula` argument counts.
enum class Formula : int64_t { kTruncate = 0, kRound = 1, kPillow = 2, kOpenCv = 3 };

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
GrayMath<T> make_math(Formula formula, double red, double green, double blue) {
  using C = compute_t<T>;
  GrayMath<T> math{static_cast<C>(red), static_cast<C>(green), static_cast<C>(blue), C(0),
                   formula == Formula::kRound ? Conversion::kRound : Conversion::kTruncate};
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
  const compute_t<T> first = std::is_integral_v<T>
                                 ? fused_multiply_add(red, math.red, math.bias)
                                 : red * math.red;
  return fused_multiply_add(blue, math.blue, fused_multiply_add(green, math.green, first));
}

// Sums of integer pixels can be infinite, never NaN.
template <typename T>
IMG2GRAY_INLINE float saturate(float value) {
  constexpr float kMax = sizeof(T) == 1 ? 255.0f : 65535.0f;
  const float positive = value > 0.0f ? value : 0.0f;
  return positive < kMax ? positive : kMax;
}

// Half to even for 0 <= value < 2^22, in any rounding unit that has fp32 addition.
IMG2GRAY_INLINE float round_half_even(float value) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the sum has no fraction bits left
  return (value + kMagic) - kMagic;
}

template <typename T, Conversion kConversion>
IMG2GRAY_INLINE T integer_gray(const GrayMath<T>& math, T red, T green, T blue) {
  static_assert(std::is_integral_v<T>);
  if constexpr (kConversion == Conversion::kFixedPoint) {
    // Only uint16 gets here, with OpenCV's weights: the sum stays below 2^32.
    constexpr FixedPoint kFixed = kOpenCvWeights;
    return static_cast<T>((red * kFixed.red + green * kFixed.green + blue * kFixed.blue +
                           (1u << (kFixed.shift - 1))) >>
                          kFixed.shift);
  } else {
    float sum = saturate<T>(weighted_sum<T>(math, red, green, blue));
    if constexpr (kConversion == Conversion::kRound) sum = round_half_even(sum);
    return static_cast<T>(static_cast<int32_t>(sum));
  }
}

}  // namespace img2gray
