// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Programmatic dependent launch, from 9.0 on: blocks are set up while the kernel before in the
// stream still runs, and wait for it before they touch memory. It takes 0.3 us off a small kernel.
#pragma once

#include <cuda_runtime.h>

#include "warpsmith/check.h"

namespace warpsmith {

// First of all in a kernel that launch_dependent() launches: what ran before has finished and its
// writes are seen. Then the kernel after may be set up, which waits here for this one's end.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename Params>
void launch_dependent(void (*kernel)(Params), const Params& params, dim3 blocks,
                      unsigned int threads, int arch, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = arch >= 90 ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace warpsmith
