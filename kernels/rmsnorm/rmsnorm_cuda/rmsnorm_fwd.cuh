// RMSNorm forward on CUDA, optionally of x + residual: see job.h for formula and roundings.
//
//   warp    rows of up to 2 vectors for each of 1 to 32 lanes, several rows to a block
//   block   a block for a row, 2 or 4 vectors for each of 64 to 1024 threads
//   looped  any length, alignment, stride and mix of dtypes: two passes over the row, the second of
//           which finds it in a cache unless it is very long
// warp and block keep the row in registers: one read, one write. They need 16-byte vectors, one
// dtype and no bias. Blocks are many and small rather than looping over rows: on an H200 that is
// 2 to 10 % faster, and 1536 threads with 32 bytes each in flight do better than fewer with more.
#pragma once

#include "rmsnorm_cuda/rows.cuh"
#include "warpsmith/dependent_launch.cuh"
#include "warpsmith/reduce.cuh"

namespace rmsnorm {

using warpsmith::kWarpSize;

struct ForwardParams {
  ForwardJob job;
  int64_t first_row, num_rows;  // of this launch
  RowThreads group;
  int num_slots;      // of a row
  bool round_normed;  // to the one dtype, before the weight
  float inverse_hidden;
  float weight_offset;  // -0 for none, which changes nothing that it is added to
};

inline constexpr int kWarpBlockThreads = 128;
inline constexpr int kMaxLoopedThreads = 512;

// Of a block for a row. With four vectors and a residual registers last for half as many.
__host__ __device__ constexpr int max_block_threads(int slots, bool add) {
  if (slots == 2) return add ? 512 : 256;
  return add ? 512 : 1024;
}

// Threads that shall fit a multiprocessor, which has 65536 registers. One of 7.5 has room for 1024.
__host__ __device__ constexpr int resident_threads(int slots, bool add) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr int kMost = 768;
#else
  constexpr int kMost = 1536;
#endif
  if (add) return slots == 2 ? 1024 : 512;
  return slots == 2 ? kMost : 1024;
}

template <bool kBlockPerRow>
__device__ __forceinline__ float row_sum(float value, int log2_lanes,
                                         float4 (&partial)[warpsmith::kMaxWarps / 4]) {
  if constexpr (kBlockPerRow) return warpsmith::block_sum(value, partial);
  return warpsmith::group_sum(value, log2_lanes);
}

__device__ __forceinline__ float reciprocal_root(const ForwardParams& p, float sum) {
  return rsqrtf(sum * p.inverse_hidden + p.job.eps);
}

template <typename T, int kSlots, bool kAdd, bool kBlockPerRow>
__global__ void __launch_bounds__(kBlockPerRow ? max_block_threads(kSlots, kAdd)
                                               : kWarpBlockThreads,
                                  resident_threads(kSlots, kAdd) /
                                      (kBlockPerRow ? max_block_threads(kSlots, kAdd)
                                                    : kWarpBlockThreads))
    registers_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kSize = kSlotSize<T>;
  __shared__ float4 partial[warpsmith::kMaxWarps / 4];
  const Place place = find_place({kBlockPerRow, p.group.log2_lanes});
  const bool in_range = kBlockPerRow || place.row < p.num_rows;
  int64_t offsets[kRowOperands];
  find_row(p.job.rows, p.first_row, place.row, offsets);
  const auto row_of = [&](auto* operand, ForwardJob::Operand which) {
    return operand + (offsets[which] + place.thread * kSize);
  };
  const T* x = row_of(static_cast<const T*>(p.job.x), ForwardJob::kX);
  const T* residual = row_of(static_cast<const T*>(p.job.residual), ForwardJob::kResidual);
  T* residual_out = row_of(static_cast<T*>(p.job.residual_out), ForwardJob::kResidualOut);
  T* y = row_of(static_cast<T*>(p.job.y), ForwardJob::kY);
  const T* weight = static_cast<const T*>(p.job.weight) + place.thread * kSize;
  const bool has_weight = p.job.weight != nullptr;
  const auto element = [&](int i) { return i * place.threads * kSize; };
  // Only the last may be missing: see choose_forward.
  const auto has_slot = [&](int i) {
    return in_range && (i < kSlots - 1 || place.thread + i * place.threads < p.num_slots);
  };

  warpsmith::wait_for_previous_kernel();
  // Those that a thread has no slot for stay undefined.
  Slot<T> values[kSlots], addends[kSlots], weights[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (!has_slot(i)) continue;
    values[i] = Slot<T>::load_from_global(x + element(i));
    if constexpr (kAdd) addends[i] = Slot<T>::load_from_global(residual + element(i));
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (has_slot(i) && has_weight) weights[i] = Slot<T>::load_from_global(weight + element(i));
  }
  end_of_loads(p.num_slots < 0);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (!has_slot(i)) continue;
    float v[kSize];
    widen<T>(values[i], v);
    if constexpr (kAdd) {
      float addend[kSize];
      widen<T>(addends[i], addend);
#pragma unroll
      for (int j = 0; j < kSize; ++j) v[j] += addend[j];
      values[i] = narrow<T>(v);
      values[i].store_to_global(residual_out + element(i));
      widen<T>(values[i], v);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) squares = fmaf(v[j], v[j], squares);
  }
  squares = row_sum<kBlockPerRow>(squares, p.group.log2_lanes, partial);
  const float rstd = reciprocal_root(p, squares);
  if (p.job.rstd != nullptr && place.thread == 0 && in_range) {
    p.job.rstd[offsets[ForwardJob::kRstd]] = rstd;
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (!has_slot(i)) continue;
    float v[kSize];
    widen<T>(values[i], v);
#pragma unroll
    for (int j = 0; j < kSize; ++j) v[j] *= rstd;
    if constexpr (sizeof(T) == 2) {
      if (has_weight && p.round_normed) {
        multiply_rounded<T>(v, weights[i]).store_to_global(y + element(i));
        continue;
      }
    }
    if (has_weight) {
      float w[kSize];
      widen<T>(weights[i], w);
#pragma unroll
      for (int j = 0; j < kSize; ++j) v[j] *= w[j] + p.weight_offset;
    }
    narrow<T>(v).store_to_global(y + element(i));
  }
}

// kCount elements for an access. With strided columns it is 1.
template <int kCount>
__global__ void __launch_bounds__(kMaxLoopedThreads)
    looped_kernel(const __grid_constant__ ForwardParams p) {
  __shared__ float4 partial[warpsmith::kMaxWarps / 4];
  const ForwardJob& job = p.job;
  const Place place = find_place(p.group);
  const int64_t hidden = place.row < p.num_rows ? job.hidden : 0;
  int64_t offsets[kRowOperands];
  find_row(job.rows, p.first_row, place.row, offsets);
  const auto at = [&](ForwardJob::Operand operand, int64_t column) {
    return offsets[operand] + column * job.column_strides[operand];
  };
  const int64_t step = int64_t{place.threads} * kCount;

  warpsmith::wait_for_previous_kernel();
  CompensatedSum sum;
  for (int64_t column = int64_t{place.thread} * kCount; column < hidden; column += step) {
    float v[kCount];
    load_as(job.x_dtype, job.x, at(ForwardJob::kX, column), v);
    if (job.residual != nullptr) {
      float addend[kCount];
      load_as(job.x_dtype, job.residual, at(ForwardJob::kResidual, column), addend);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += addend[i];
      store_as(job.x_dtype, job.residual_out, at(ForwardJob::kResidualOut, column), v);
      round_to(job.x_dtype, v);
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) squares = fmaf(v[i], v[i], squares);
    sum.add(squares);
  }
  const float squares = p.group.block_per_row
                            ? warpsmith::block_sum(sum.value(), partial)
                            : warpsmith::group_sum(sum.value(), p.group.log2_lanes);
  const float rstd = reciprocal_root(p, squares);
  if (job.rstd != nullptr && place.thread == 0 && hidden > 0) {
    job.rstd[offsets[ForwardJob::kRstd]] = rstd;
  }
  const bool added = job.residual != nullptr;
  const ScalarType normed_dtype =
      job.rounding == Rounding::kInputDtype ? job.x_dtype : job.weight_dtype;
  for (int64_t column = int64_t{place.thread} * kCount; column < hidden; column += step) {
    float v[kCount];
    load_as(job.x_dtype, added ? job.residual_out : job.x,
            at(added ? ForwardJob::kResidualOut : ForwardJob::kX, column), v);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= rstd;
    if (job.weight != nullptr) {
      if (job.rounding != Rounding::kOnce) round_to(normed_dtype, v);
      float w[kCount];
      load_as(job.weight_dtype, job.weight, column * job.weight_stride, w);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] *= w[i] + p.weight_offset;
      if (job.bias != nullptr) {
        if (job.rounding != Rounding::kOnce) round_to(job.y_dtype, v);
        float b[kCount];
        load_as(job.weight_dtype, job.bias, column * job.bias_stride, b);
#pragma unroll
        for (int i = 0; i < kCount; ++i) v[i] += b[i];
      }
    }
    store_as(job.y_dtype, job.y, at(ForwardJob::kY, column), v);
  }
}

enum class Strategy : int { kWarp, kBlock, kLooped };

inline constexpr const char* kStrategyNames[] = {"warp", "block", "looped"};

struct RowsShape {
  int64_t num_rows;
  int64_t hidden;
  int element_bytes;    // of x
  bool add;             // a residual, or its gradient
  bool in_slots;        // one dtype, no bias, 16-byte vectors throughout
  int access_elements;  // else: the most that all operands allow, up to 8
};

struct ForwardConfig {
  Strategy strategy;
  int slots;  // vectors of a thread
  RowThreads group;
  unsigned int threads;  // of a block
  int64_t rows_per_block;
};

inline constexpr int kLoopedThreadAccesses = 4;

constexpr unsigned int whole_warps(int64_t threads) {
  return static_cast<unsigned int>(warpsmith::ceil_div(threads, kWarpSize) * kWarpSize);
}

// For kernels that take any row: lanes for short ones, else blocks.
constexpr RowThreads looped_group(int64_t accesses) {
  const bool block = accesses > kWarpSize * kLoopedThreadAccesses;
  return {block, block ? 0 : log2_ceil(accesses < kWarpSize ? accesses : kWarpSize)};
}

constexpr unsigned int looped_threads(RowThreads group, int64_t accesses) {
  const int64_t wanted = warpsmith::ceil_div(accesses, kLoopedThreadAccesses);
  return group.block_per_row ? whole_warps(wanted < kMaxLoopedThreads ? wanted : kMaxLoopedThreads)
                             : kWarpBlockThreads;
}

// Pure: sizes in, launch out. All vectors of a thread but the last lie in every row, since there
// are no more threads than that takes. Vectors for a thread are those that were fastest on an H200:
// two, or four in long rows.
constexpr ForwardConfig choose_forward(const RowsShape& shape) {
  const int64_t slots = shape.hidden * shape.element_bytes / kSlotBytes;
  if (shape.in_slots && slots <= 2 * kWarpSize) {
    const int log2_lanes = log2_ceil(warpsmith::ceil_div(slots, 2));
    return {Strategy::kWarp,
            2,
            {false, log2_lanes},
            kWarpBlockThreads,
            kWarpBlockThreads >> log2_lanes};
  }
  const int thread_slots = slots <= 2 * max_block_threads(2, shape.add) ? 2 : 4;
  const int64_t wanted = warpsmith::ceil_div(slots, thread_slots);
  if (shape.in_slots && wanted <= max_block_threads(thread_slots, shape.add)) {
    return {Strategy::kBlock, thread_slots, {true, 0}, whole_warps(wanted), 1};
  }
  const int64_t accesses = warpsmith::ceil_div(shape.hidden, shape.access_elements);
  const RowThreads group = looped_group(accesses);
  const unsigned int threads = looped_threads(group, accesses);
  return {Strategy::kLooped, 0, group, threads,
          group.block_per_row ? 1 : threads >> group.log2_lanes};
}

template <typename F>
void with_access(int elements, F&& f) {
  switch (elements) {
    case 8:
      return f(std::integral_constant<int, 8>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    default:
      return f(std::integral_constant<int, 1>{});
  }
}

// Launches for all rows: one, but where they are more than 31 bits count.
template <typename F>
void for_each_launch(int64_t num_rows, int64_t rows_per_block, F&& launch) {
  const int64_t most = INT32_MAX / rows_per_block * rows_per_block;
  for (int64_t first = 0; first < num_rows; first += most) {
    const int64_t left = num_rows - first, count = left < most ? left : most;
    launch(first, count,
           dim3(static_cast<unsigned int>(warpsmith::ceil_div(count, rows_per_block))));
  }
}

}  // namespace rmsnorm
