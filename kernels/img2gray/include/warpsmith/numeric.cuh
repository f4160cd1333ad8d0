// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Storage types to the type that computes, and back with one rounding to nearest even.
//
// Results of arithmetic: their NaNs are the positive ones that the GPU makes, above infinity in the
// order of signed integers, and are written as the quiet NaN without payload, so that results do
// not depend on which unit made them.
#pragma once

#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "warpsmith/dispatch.h"

namespace warpsmith {

template <typename T>
__device__ __forceinline__ float to_compute(T value) {
  return static_cast<float>(value);
}
template <>
__device__ __forceinline__ float to_compute(Half value) {
  return __half2float(__ushort_as_half(value.x));
}
template <>
__device__ __forceinline__ float to_compute(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.x) << 16);
}
__device__ __forceinline__ double to_compute(double value) { return value; }

template <typename T>
inline constexpr int kQuietNaN = 0x7fc00000;
template <>
inline constexpr int kQuietNaN<Half> = 0x7e00;
template <>
inline constexpr int kQuietNaN<BFloat16> = 0x7fc0;

// Two values of 16 bits in a word, the first in the low half. NaNs may be any.
template <typename T>
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
  if constexpr (std::is_same_v<T, Half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return __half_as_ushort(pair.x) | static_cast<uint32_t>(__half_as_ushort(pair.y)) << 16;
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return __bfloat16_as_ushort(pair.x) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
  }
}

template <typename T>
__device__ __forceinline__ uint32_t with_quiet_nans(uint32_t pair) {
  return __vmins2(pair, kQuietNaN<T> * 0x10001u);
}

// Two results.
template <typename T>
__device__ __forceinline__ uint32_t pack_from_compute(float first, float second) {
  return with_quiet_nans<T>(round_pair<T>(first, second));
}

// Products of pairs, rounded once: what float products, which are exact, would be rounded to.
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, Half>) {
    const __half2 product =
        __hmul2_rn(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&product);
  } else {
    const __nv_bfloat162 product =
        __hmul2_rn(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&product);
  }
}

template <typename T>
__device__ __forceinline__ float2 unpack_to_compute(uint32_t bits) {
  if constexpr (std::is_same_v<T, Half>) {
    return __half22float2(
        __halves2half2(__ushort_as_half(static_cast<unsigned short>(bits)),
                       __ushort_as_half(static_cast<unsigned short>(bits >> 16))));
  } else {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
}

template <typename T>
__device__ __forceinline__ T from_compute(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return __int_as_float(min(__float_as_int(value), kQuietNaN<float>));
  } else {
    const uint32_t bits = pack_from_compute<T>(value, 0.0f);
    return T(static_cast<unsigned short>(bits), T::from_bits());
  }
}
template <typename T>
__device__ __forceinline__ T from_compute(double value) {
  return value == value ? value : __longlong_as_double(0x7ff8000000000000ll);
}

}  // namespace warpsmith
