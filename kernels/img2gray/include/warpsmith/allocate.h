// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// New tensors for results, through the C function: torch::stable::new_empty looks its schema up by
// name at every call.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "warpsmith/tensor_check.h"
#include "warpsmith/tensor_info.h"

namespace warpsmith {

// Uninitialised and contiguous, with the dtype and device of `like`.
inline Tensor empty_contiguous(const std::vector<int64_t>& sizes, const TensorInfo& like) {
  const int64_t rank = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (int64_t dim = rank - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.tensor.get(), &dtype));
  AtenTensorHandle tensor = nullptr;
  // The C function loses torch's message, and with it the type of an out-of-memory error.
  STD_TORCH_CHECK(
      aoti_torch_empty_strided(rank, sizes.data(), strides.data(), dtype, like.device_type,
                               like.device_index, &tensor) == TORCH_SUCCESS,
      like.is_cuda() ? "CUDA out of memory. " : "out of memory: ", "cannot allocate ",
      stride * like.element_size, " bytes for a result of shape ", shape_string(sizes));
  return Tensor(tensor);
}

}  // namespace warpsmith
