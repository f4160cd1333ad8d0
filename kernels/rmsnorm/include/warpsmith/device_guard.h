// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Makes a device the current one for a scope.
#pragma once

#include <optional>

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>

#include "warpsmith/check.h"

namespace warpsmith {

// torch's guard allocates memory and asks the runtime four times: it is made where it has something
// to change.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int current = -1;
    CUDA_CHECK(cudaGetDevice(&current));
    if (current != device) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace warpsmith
