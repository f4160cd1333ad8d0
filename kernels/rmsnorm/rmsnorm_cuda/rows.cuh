// Where rows and their elements are: offsets of a row, and accesses of elements whose dtype is
// known at run time.
#pragma once

#include "rmsnorm_common/job.h"
#include "warpsmith/numeric.cuh"
#include "warpsmith/vec.cuh"

namespace rmsnorm {

using warpsmith::Vec;

template <typename Index>
__device__ __forceinline__ void add_nested_offsets(const Rows& rows, Index rest,
                                                   int64_t (&offsets)[kRowOperands]) {
#pragma unroll 1
  for (int dim = 0; dim < rows.num_dims; ++dim) {
    const Index size = static_cast<Index>(rows.sizes[dim]);
    const int64_t index = rest % size;
    rest /= size;
#pragma unroll
    for (int i = 0; i < kRowOperands; ++i) offsets[i] += index * rows.strides[dim][i];
  }
}

// Of row first + row, in elements. Strides of rows without dims are 0.
template <typename Index>
__device__ __forceinline__ void find_row(const Rows& rows, int64_t first, Index row,
                                         int64_t (&offsets)[kRowOperands]) {
  if (rows.num_dims <= 1) {
#pragma unroll
    for (int i = 0; i < kRowOperands; ++i) offsets[i] = row * rows.strides[0][i];
    if (first == 0) return;  // as ever, but for more rows than a launch takes
#pragma unroll
    for (int i = 0; i < kRowOperands; ++i) offsets[i] += first * rows.strides[0][i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kRowOperands; ++i) offsets[i] = 0;
  // 64-bit division is a subroutine.
  if (rows.count <= INT32_MAX) {
    add_nested_offsets(rows, static_cast<uint32_t>(first + row), offsets);
  } else {
    add_nested_offsets(rows, static_cast<uint64_t>(first + row), offsets);
  }
}

inline constexpr int kSlotBytes = 16;

// 16 bytes of a row, in registers.
template <typename T>
using Slot = Vec<T, kSlotBytes>;

template <typename T>
inline constexpr int kSlotSize = Slot<T>::kSize;

template <typename T>
__device__ __forceinline__ void widen(const Slot<T>& slot, float (&values)[kSlotSize<T>]) {
  const uint32_t words[4] = {slot.word.x, slot.word.y, slot.word.z, slot.word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2) {
      const float2 pair = warpsmith::unpack_to_compute<T>(words[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    } else {
      values[i] = __uint_as_float(words[i]);
    }
  }
}

// Rounds once.
template <typename T>
__device__ __forceinline__ Slot<T> narrow(const float (&values)[kSlotSize<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2) {
      words[i] = warpsmith::pack_from_compute<T>(values[2 * i], values[2 * i + 1]);
    } else {
      words[i] = __float_as_uint(warpsmith::from_compute<T>(values[i]));
    }
  }
  Slot<T> slot;
  slot.word = make_uint4(words[0], words[1], words[2], words[3]);
  return slot;
}

template <typename T>
__device__ __forceinline__ Slot<T> multiply_rounded(const float (&values)[kSlotSize<T>],
                                                    const Slot<T>& weights) {
  static_assert(sizeof(T) == 2, "types of 16 bits");
  uint32_t words[4] = {weights.word.x, weights.word.y, weights.word.z, weights.word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t rounded = warpsmith::round_pair<T>(values[2 * i], values[2 * i + 1]);
    words[i] = warpsmith::with_quiet_nans<T>(warpsmith::multiply_pairs<T>(rounded, words[i]));
  }
  Slot<T> slot;
  slot.word = make_uint4(words[0], words[1], words[2], words[3]);
  return slot;
}

// In every half of a word for types of 16 bits.
template <typename T>
inline constexpr uint32_t kWordOfOnes = 0x3f800000u;
template <>
inline constexpr uint32_t kWordOfOnes<BFloat16> = 0x3f803f80u;
template <>
inline constexpr uint32_t kWordOfOnes<Half> = 0x3c003c00u;

template <typename T>
__device__ __forceinline__ Slot<T> filled_slot(uint32_t word) {
  Slot<T> slot;
  slot.word = make_uint4(word, word, word, word);
  return slot;
}

// Values that were computed are kept after this: the compiler would compute them again at each use.
template <int kCount>
__device__ __forceinline__ void keep_values(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i]));
}

// kCount elements side by side, which may be split over several accesses of 16 bytes.
template <typename T, int kCount>
__device__ __forceinline__ void load_elements(const T* from, float (&values)[kCount]) {
  constexpr int kBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
  constexpr int kStep = kBytes / sizeof(T);
#pragma unroll
  for (int first = 0; first < kCount; first += kStep) {
    const auto vec = Vec<T, kBytes>::load(from + first);
#pragma unroll
    for (int i = 0; i < kStep; ++i) values[first + i] = warpsmith::to_compute(vec.elements[i]);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void store_elements(T* to, const float (&values)[kCount]) {
  constexpr int kBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
  constexpr int kStep = kBytes / sizeof(T);
#pragma unroll
  for (int first = 0; first < kCount; first += kStep) {
    Vec<T, kBytes> vec;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      vec.elements[i] = warpsmith::from_compute<T>(values[first + i]);
    }
    vec.store(to + first);
  }
}

template <int kCount>
__device__ __forceinline__ void load_as(ScalarType dtype, const void* from, int64_t offset,
                                        float (&values)[kCount]) {
  if (dtype == warpsmith::dtype_of<BFloat16>) {
    load_elements(static_cast<const BFloat16*>(from) + offset, values);
  } else if (dtype == warpsmith::dtype_of<Half>) {
    load_elements(static_cast<const Half*>(from) + offset, values);
  } else {
    load_elements(static_cast<const float*>(from) + offset, values);
  }
}

template <int kCount>
__device__ __forceinline__ void store_as(ScalarType dtype, void* to, int64_t offset,
                                         const float (&values)[kCount]) {
  if (dtype == warpsmith::dtype_of<BFloat16>) {
    store_elements(static_cast<BFloat16*>(to) + offset, values);
  } else if (dtype == warpsmith::dtype_of<Half>) {
    store_elements(static_cast<Half*>(to) + offset, values);
  } else {
    store_elements(static_cast<float*>(to) + offset, values);
  }
}

template <int kCount>
__device__ __forceinline__ void round_to(ScalarType dtype, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (dtype == warpsmith::dtype_of<BFloat16>) {
      values[i] = warpsmith::to_compute(warpsmith::from_compute<BFloat16>(values[i]));
    } else if (dtype == warpsmith::dtype_of<Half>) {
      values[i] = warpsmith::to_compute(warpsmith::from_compute<Half>(values[i]));
    }
  }
}

// Ends a basic block: the compiler may otherwise put loads above behind the first use of another,
// and so behind a wait for memory. `never` must be false, and unknown to the compiler.
__device__ __forceinline__ void end_of_loads(bool never) {
  if (never) __trap();
}

// A sum of many terms that loses next to nothing: what rounding cuts off is added to the next term,
// as long as the sum is finite.
class CompensatedSum {
 public:
  __device__ __forceinline__ void add(float term) {
    const float corrected = term + rest_;
    const float sum = sum_ + corrected;
    const float rest = corrected - (sum - sum_);
    rest_ = isfinite(rest) ? rest : 0.0f;
    sum_ = sum;
  }
  __device__ __forceinline__ float value() const { return sum_; }

 private:
  float sum_ = 0.0f, rest_ = 0.0f;
};

// The threads of a row: lanes side by side in a warp, or a whole block. Host and device.
struct RowThreads {
  bool block_per_row;
  int log2_lanes;
};

// Which row of the launch a thread works on, and its place among the threads of the row.
struct Place {
  uint32_t row;
  int thread, threads;
};

__device__ __forceinline__ uint32_t rows_per_block(RowThreads group) {
  return group.block_per_row ? 1 : blockDim.x >> group.log2_lanes;
}

__device__ __forceinline__ Place find_place(RowThreads group) {
  const int thread = threadIdx.x;
  if (group.block_per_row) return {blockIdx.x, thread, static_cast<int>(blockDim.x)};
  const int lanes = 1 << group.log2_lanes;
  return {blockIdx.x * rows_per_block(group) + (thread >> group.log2_lanes), thread & (lanes - 1),
          lanes};
}

constexpr int log2_ceil(int64_t value) {
  int log2 = 0;
  while ((int64_t{1} << log2) < value) ++log2;
  return log2;
}

}  // namespace rmsnorm
