// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Storage types to the type that computes, and back with one rounding to nearest even. Every NaN is
// written as the positive quiet NaN without payload, so that results do not depend on which unit
// made it.
#pragma once

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
__device__ __forceinline__ T from_compute(float value);
template <>
__device__ __forceinline__ float from_compute(float value) {
  return value == value ? value : __uint_as_float(0x7fc00000u);
}
template <>
__device__ __forceinline__ Half from_compute(float value) {
  const unsigned short bits = __half_as_ushort(__float2half_rn(value));
  return Half(value == value ? bits : static_cast<unsigned short>(0x7e00), Half::from_bits());
}
template <>
__device__ __forceinline__ BFloat16 from_compute(float value) {
  const unsigned short bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  return BFloat16(value == value ? bits : static_cast<unsigned short>(0x7fc0),
                  BFloat16::from_bits());
}
template <typename T>
__device__ __forceinline__ T from_compute(double value) {
  return value == value ? value : __longlong_as_double(0x7ff8000000000000ll);
}

}  // namespace warpsmith
