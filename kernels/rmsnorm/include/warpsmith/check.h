// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// CUDA result checks that throw; nothing here exits or prints. The error is taken out of the
// runtime, so that a later check of somebody else's does not find it.
#pragma once

#include <cuda_runtime.h>

#include <torch/headeronly/util/Exception.h>

#define CUDA_CHECK(expr)                                                        \
  do {                                                                          \
    const cudaError_t warpsmith_error = (expr);                                 \
    if (warpsmith_error != cudaSuccess) {                                       \
      (void)cudaGetLastError();                                                 \
      STD_TORCH_CHECK(false, #expr, ": ", cudaGetErrorString(warpsmith_error)); \
    }                                                                           \
  } while (0)

// After <<<...>>>: a bad launch configuration or a missing kernel image.
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())
