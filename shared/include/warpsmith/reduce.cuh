// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Sums over threads, in an order that depends on the number of threads alone.
#pragma once

#include "warpsmith/launch.cuh"

namespace warpsmith {

// Over groups of 2^log2_lanes lanes side by side; every lane gets the sum of its group. All lanes
// of the warp must call it.
__device__ __forceinline__ float group_sum(float value, int log2_lanes) {
#pragma unroll
  for (int step = 4; step >= 0; --step) {
    if (step < log2_lanes) value += __shfl_xor_sync(0xffffffffu, value, 1 << step);
  }
  return value;
}

inline constexpr int kMaxWarps = 32;

__device__ __forceinline__ float sum_of_four(float4 values) {
  return (values.x + values.y) + (values.z + values.w);
}

// Over a block of whole warps; every thread gets the sum. `partial` is shared memory: a call must
// not meet one whose sums are still being read.
__device__ __forceinline__ float block_sum(float value, float4 (&partial)[kMaxWarps / 4]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_warps = static_cast<int>(blockDim.x / kWarpSize);
  float* sums = reinterpret_cast<float*>(partial);
  value = group_sum(value, 5);
  if (lane == 0) sums[warp] = value;
  if (warp == 0 && lane >= num_warps) sums[lane] = 0.0f;
  __syncthreads();
  float total = sum_of_four(partial[0]) + sum_of_four(partial[1]);
  if (num_warps > 8) total += sum_of_four(partial[2]) + sum_of_four(partial[3]);
  if (num_warps > 16) {
    total += (sum_of_four(partial[4]) + sum_of_four(partial[5])) +
             (sum_of_four(partial[6]) + sum_of_four(partial[7]));
  }
  return total;
}

}  // namespace warpsmith
