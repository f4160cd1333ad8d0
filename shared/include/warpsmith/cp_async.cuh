// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// cp.async: 16-byte copies from global to shared memory that bypass registers and L1. Compute capability 8.0 and newer;
// compiled for less, the copy is a plain load and store, so that a kernel holding it still compiles.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace warpsmith {

__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// Everything this thread has started so far; other threads still need a barrier.
__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace warpsmith
