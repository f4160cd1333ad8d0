// RMSNorm backward on CUDA: see job.h for the formula.
//
//   warp, block   as in the forward, dx and the partial sums of dweight in one pass: as many blocks
//                 as fit at once walk over the rows, keep sums of their columns in registers, and
//                 load the next row while they work on this one
//   looped        any length, alignment, stride and mix of dtypes, and dbias: one kernel reads a
//                 row twice for dx, another walks down columns for dweight and dbias
// A last kernel adds the partial sums. All orders follow from sizes and the number of
// multiprocessors.
#pragma once

#include "rmsnorm_cuda/rmsnorm_fwd.cuh"

namespace rmsnorm {

struct BackwardParams {
  BackwardJob job;
  int64_t first_row, num_rows;  // of this launch, for looped_backward_kernel
  RowThreads group;
  int num_slots;
  float inverse_hidden;
  float weight_offset;
  int64_t row_steps[kRowOperands];  // of rows of one dim, from a row of a block to its next
};

inline constexpr int kMaxBackwardThreads = 512;  // of a block for a row
inline constexpr int kBackwardWarpBlockThreads = 256;
inline constexpr int kBackwardWarps = kBackwardWarpBlockThreads / kWarpSize;

// Threads that fit a multiprocessor, which has 65536 registers.
inline constexpr int kBackwardResidentThreads = 512;

// Where a thread's part of a row begins: what is read of one row, and written or added of another.
template <typename T>
struct RowPointers {
  const T* x;
  const T* dy;
  const float* rstd;
  T* dx;
  const T* dresidual;

  __device__ __forceinline__ void find_read(const BackwardJob& job, int64_t row, int column) {
    int64_t offsets[kRowOperands];
    find_row(job.rows, 0, row, offsets);
    x = static_cast<const T*>(job.x) + offsets[BackwardJob::kX] + column;
    dy = static_cast<const T*>(job.dy) + offsets[BackwardJob::kDy] + column;
    rstd = job.rstd + offsets[BackwardJob::kRstd];
  }

  __device__ __forceinline__ void find_written(const BackwardJob& job, int64_t row, int column) {
    int64_t offsets[kRowOperands];
    find_row(job.rows, 0, row, offsets);
    dx = static_cast<T*>(job.dx) + offsets[BackwardJob::kDx] + column;
    dresidual = static_cast<const T*>(job.dresidual) + offsets[BackwardJob::kDresidual] + column;
  }
};

template <typename T, int kSlots>
struct RowGradients {
  Slot<T> x[kSlots], dy[kSlots];
  float rstd;
};

// Adds the sums of the rows that the warps of a block worked on, and those of the lanes in them.
template <int kSlots, int kSize>
__device__ __forceinline__ void write_block_sums(
    const BackwardParams& p, float (&sums)[kSlots][kSize],
    float (&staged)[kBackwardWarps][kSlots][kWarpSize][kSize]) {
  const int lanes = 1 << p.group.log2_lanes;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      for (int step = lanes; step < kWarpSize; step *= 2) {
        sums[i][j] += __shfl_xor_sync(0xffffffffu, sums[i][j], step);
      }
      if (lane < lanes) staged[warp][i][lane][j] = sums[i][j];
    }
  }
  __syncthreads();
  const int hidden = p.num_slots * kSize;
  float* to = p.job.partials + int64_t{blockIdx.x} * hidden;
  for (int column = threadIdx.x; column < hidden; column += blockDim.x) {
    const int slot = column / kSize;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kBackwardWarps; ++i) {
      total += staged[i][slot >> p.group.log2_lanes][slot & (lanes - 1)][column % kSize];
    }
    to[column] = total;
  }
}

template <typename T, int kSlots, bool kBlockPerRow>
__global__ void __launch_bounds__(kBlockPerRow ? kMaxBackwardThreads : kBackwardWarpBlockThreads,
                                  kBackwardResidentThreads / (kBlockPerRow
                                                                  ? kMaxBackwardThreads
                                                                  : kBackwardWarpBlockThreads))
    registers_backward_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int kSize = kSlotSize<T>;
  constexpr bool kFewSlots = kSlots == 2;  // registers last for weights and the next row too
  // Two, so that sums of one row may still be read when those of the next are written.
  __shared__ float4 partial[2][warpsmith::kMaxWarps / 4];
  const BackwardJob& job = p.job;
  const RowThreads group{kBlockPerRow, p.group.log2_lanes};
  const Place place = find_place(group);
  const uint32_t num_rows = static_cast<uint32_t>(job.rows.count);  // see choose_backward
  const uint32_t row_step = gridDim.x * rows_per_block(group);
  const auto element = [&](int i) { return i * place.threads * kSize; };
  const auto has_slot = [&](int i) {
    return i < kSlots - 1 || place.thread + i * place.threads < p.num_slots;
  };
  const auto load_slots = [&](const T* row, Slot<T>(&slots)[kSlots]) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (has_slot(i)) slots[i] = Slot<T>::load_from_global(row + element(i));
    }
  };
  RowPointers<T> at = {};
  const auto load = [&](RowGradients<T, kSlots>& to) {
    to.rstd = *at.rstd;
    load_slots(at.x, to.x);
    load_slots(at.dy, to.dy);
  };
  const auto load_slot = [&](int i, const T* x_row, const T* dy_row, RowGradients<T, kSlots>& to) {
    to.x[i] = Slot<T>::load_from_global(x_row + element(i));
    to.dy[i] = Slot<T>::load_from_global(dy_row + element(i));
  };
  const auto load_weights = [&](int i, float (&w)[kSize]) {
    Slot<T> slot = filled_slot<T>(kWordOfOnes<T>);
    if (job.weight != nullptr && has_slot(i)) {
      slot = Slot<T>::load_from_global(static_cast<const T*>(job.weight) + place.thread * kSize +
                                       element(i));
    }
    widen<T>(slot, w);
#pragma unroll
    for (int j = 0; j < kSize; ++j) w[j] += p.weight_offset;
  };

  warpsmith::wait_for_previous_kernel();
  const int column = place.thread * kSize;
  at.find_read(job, place.row, column);
  at.find_written(job, place.row, column);
  RowGradients<T, kSlots> now, next;
  if (kFewSlots && place.row < num_rows) load(now);
  float weights[kFewSlots ? kSlots : 1][kSize], sums[kSlots][kSize];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if constexpr (kFewSlots) {
      load_weights(i, weights[i]);
      keep_values(weights[i]);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) sums[i][j] = 0.0f;
  }
  const bool nested = job.rows.num_dims > 1;
  int parity = 0;
  // As often for all threads of a block, which wait for each other.
  for (uint32_t first = blockIdx.x * rows_per_block(group), row = place.row; first < num_rows;
       first += row_step, row += row_step) {
    const bool in_range = kBlockPerRow || row < num_rows;
    const bool next_in_range = row + row_step < num_rows;
    const T* x_row = at.x;
    const T* dy_row = at.dy;
    if (!kFewSlots && in_range) now.rstd = *at.rstd;
    if (nested) {
      at.find_read(job, row + row_step, column);
      at.find_written(job, row, column);
    } else {
      at.x += p.row_steps[BackwardJob::kX];
      at.dy += p.row_steps[BackwardJob::kDy];
      at.rstd += p.row_steps[BackwardJob::kRstd];
    }
    if (kFewSlots && next_in_range) load(next);
    Slot<T> addends[kSlots];
    if (kFewSlots && job.dresidual != nullptr && in_range) load_slots(at.dresidual, addends);
    end_of_loads(p.num_slots < 0);
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (!in_range || !has_slot(i)) continue;
      if constexpr (!kFewSlots) load_slot(i, x_row, dy_row, now);
      float x[kSize], dy[kSize], reloaded[kSize];
      widen<T>(now.x[i], x);
      widen<T>(now.dy[i], dy);
      if constexpr (!kFewSlots) load_weights(i, reloaded);
      const auto& w = kFewSlots ? weights[i] : reloaded;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float n = x[j] * now.rstd;
        sums[i][j] = fmaf(dy[j], n, sums[i][j]);
        dot = fmaf(dy[j] * w[j], n, dot);
      }
    }
    dot = row_sum<kBlockPerRow>(dot, p.group.log2_lanes, partial[parity]);
    parity ^= 1;
    const float n_factor = -dot * p.inverse_hidden * now.rstd;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (!in_range || !has_slot(i)) continue;
      if constexpr (!kFewSlots) load_slot(i, x_row, dy_row, now);  // from a cache
      float x[kSize], dy[kSize], reloaded[kSize], result[kSize];
      widen<T>(now.x[i], x);
      widen<T>(now.dy[i], dy);
      if constexpr (!kFewSlots) load_weights(i, reloaded);
      const auto& w = kFewSlots ? weights[i] : reloaded;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        result[j] = fmaf(x[j] * now.rstd, n_factor, now.rstd * (dy[j] * w[j]));
      }
      if (job.dresidual != nullptr) {
        if constexpr (!kFewSlots) {
          addends[i] = Slot<T>::load_from_global(at.dresidual + element(i));
        }
        float addend[kSize];
        widen<T>(addends[i], addend);
#pragma unroll
        for (int j = 0; j < kSize; ++j) result[j] += addend[j];
      }
      narrow<T>(result).store_to_global(at.dx + element(i));
    }
    if (!nested) {
      at.dx += p.row_steps[BackwardJob::kDx];
      at.dresidual += p.row_steps[BackwardJob::kDresidual];
    }
    if constexpr (kFewSlots) now = next;
  }
  if (job.dweight == nullptr) return;
  if constexpr (kBlockPerRow) {
    float* to = job.partials + int64_t{blockIdx.x} * job.hidden + place.thread * kSize;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (has_slot(i)) store_elements(to + element(i), sums[i]);
    }
  } else {
    __shared__ float staged[kBackwardWarps][kSlots][kWarpSize][kSize];
    write_block_sums<kSlots, kSize>(p, sums, staged);
  }
}

template <int kCount>
__global__ void __launch_bounds__(kMaxLoopedThreads)
    looped_backward_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ float4 partial[warpsmith::kMaxWarps / 4];
  const BackwardJob& job = p.job;
  const Place place = find_place(p.group);
  const int64_t hidden = place.row < p.num_rows ? job.hidden : 0;
  int64_t offsets[kRowOperands];
  find_row(job.rows, p.first_row, place.row, offsets);
  const auto at = [&](BackwardJob::Operand operand, int64_t column) {
    return offsets[operand] + column * job.column_strides[operand];
  };
  const int64_t step = int64_t{place.threads} * kCount;

  warpsmith::wait_for_previous_kernel();
  const float rstd = hidden > 0 ? job.rstd[offsets[BackwardJob::kRstd]] : 0.0f;
  const auto load_row = [&](int64_t column, float (&g)[kCount], float (&n)[kCount]) {
    load_as(job.dy_dtype, job.dy, at(BackwardJob::kDy, column), g);
    load_as(job.x_dtype, job.x, at(BackwardJob::kX, column), n);
    if (job.weight != nullptr) {
      float w[kCount];
      load_as(job.weight_dtype, job.weight, column * job.weight_stride, w);
#pragma unroll
      for (int i = 0; i < kCount; ++i) g[i] *= w[i] + p.weight_offset;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) n[i] *= rstd;
  };
  CompensatedSum sum;
  for (int64_t column = int64_t{place.thread} * kCount; column < hidden; column += step) {
    float g[kCount], n[kCount];
    load_row(column, g, n);
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) dot = fmaf(g[i], n[i], dot);
    sum.add(dot);
  }
  const float dot = p.group.block_per_row ? warpsmith::block_sum(sum.value(), partial)
                                          : warpsmith::group_sum(sum.value(), p.group.log2_lanes);
  const float mean = dot * p.inverse_hidden;
  for (int64_t column = int64_t{place.thread} * kCount; column < hidden; column += step) {
    float g[kCount], n[kCount];
    load_row(column, g, n);
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = rstd * fmaf(-n[i], mean, g[i]);
    if (job.dresidual != nullptr) {
      float addend[kCount];
      load_as(job.x_dtype, job.dresidual, at(BackwardJob::kDresidual, column), addend);
#pragma unroll
      for (int i = 0; i < kCount; ++i) g[i] += addend[i];
    }
    store_as(job.x_dtype, job.dx, at(BackwardJob::kDx, column), g);
  }
}

inline constexpr int kSumThreads = 1024;

// Columns of the partial sums, kColumns for a block.
template <int kColumns>
__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int kRows = kSumThreads / kColumns;
  constexpr int kAtOnce = 12;  // loads of a thread before it waits
  __shared__ float sums[kRows][kColumns + 1];
  const BackwardJob& job = p.job;
  const int64_t width =
      job.dweight != nullptr && job.dbias != nullptr ? 2 * job.hidden : job.hidden;
  const int64_t first_column = int64_t{blockIdx.x} * kColumns;
  const int row = threadIdx.x / kColumns, own_column = threadIdx.x % kColumns;
  const int64_t step = kRows * width;
  const float* from = job.partials + (row * width + first_column + own_column);
  int left = first_column + own_column < width ? static_cast<int>(job.num_partials) - row : 0;
  warpsmith::wait_for_previous_kernel();
  float sum = 0.0f;
#pragma unroll 1
  for (; left > 0; left -= kAtOnce * kRows) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, from += step) values[i] = i * kRows < left ? *from : 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += values[i];
  }
  sums[row][own_column] = sum;
  __syncthreads();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (warp >= kColumns) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; i += kWarpSize) sum += sums[i + lane][warp];
  sum = warpsmith::group_sum(sum, 5);
  const int64_t column = first_column + warp;
  if (lane > 0 || column >= width) return;
  const float total[1] = {sum};
  void* first = job.dweight != nullptr ? job.dweight : job.dbias;
  const bool second = column >= job.hidden;
  store_as(job.weight_dtype, second ? job.dbias : first, second ? column - job.hidden : column,
           total);
}

inline constexpr int kColumnThreads = 128;  // of columns_kernel

struct BackwardConfig {
  Strategy strategy;
  int slots;
  RowThreads group;
  unsigned int threads;
  int64_t rows_per_block;
  int64_t partials;  // blocks of warp and block; parts of the rows for columns_kernel
};

constexpr BackwardConfig choose_backward(const RowsShape& shape, int multiprocessors) {
  const int64_t slots = shape.hidden * shape.element_bytes / kSlotBytes;
  const auto persistent = [&](Strategy strategy, int thread_slots, RowThreads group,
                              unsigned int threads) {
    const int64_t rows_per_block = group.block_per_row ? 1 : threads >> group.log2_lanes;
    const int64_t at_once = int64_t{multiprocessors} * (kBackwardResidentThreads / threads);
    const int64_t wanted = warpsmith::ceil_div(shape.num_rows, rows_per_block);
    return BackwardConfig{strategy, thread_slots,   group,
                          threads,  rows_per_block, wanted < at_once ? wanted : at_once};
  };
  if (shape.in_slots && shape.num_rows <= INT32_MAX) {
    if (slots <= 2 * kWarpSize) {
      const RowThreads group{false, log2_ceil(warpsmith::ceil_div(slots, 2))};
      return persistent(Strategy::kWarp, 2, group, kBackwardWarpBlockThreads);
    }
    for (int thread_slots : {2, 4}) {
      if (slots <= thread_slots * kMaxBackwardThreads) {
        return persistent(Strategy::kBlock, thread_slots, {true, 0},
                          whole_warps(warpsmith::ceil_div(slots, thread_slots)));
      }
    }
  }
  const int64_t accesses = warpsmith::ceil_div(shape.hidden, shape.access_elements);
  const RowThreads group = looped_group(accesses);
  const unsigned int threads = looped_threads(group, accesses);
  const int64_t column_blocks = warpsmith::ceil_div(shape.hidden, kColumnThreads);
  const int64_t parts = warpsmith::ceil_div(int64_t{8} * multiprocessors, column_blocks);
  const int64_t most = warpsmith::ceil_div(shape.num_rows, 8);
  return {Strategy::kLooped,
          0,
          group,
          threads,
          group.block_per_row ? 1 : threads >> group.log2_lanes,
          parts < most ? parts : most};
}

}  // namespace rmsnorm
