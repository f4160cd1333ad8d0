// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// CUDA result checks that throw; nothing here exits or prints.
#pragma once

#include <cuda_runtime.h>

#include <torch/headeronly/util/Exception.h>

#define CUDA_CHECK(expr)                                         \
  do {                                                           \
    const cudaError_t warpsmith_error = (expr);                  \
    STD_TORCH_CHECK(warpsmith_error == cudaSuccess, #expr, ": ", \
                    cudaGetErrorString(warpsmith_error));        \
  } while (0)

// After <<<...>>>: a bad launch configuration or a missing kernel image.
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())
