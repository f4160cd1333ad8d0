// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// New tensors for results, through the C function: torch::stable::new_empty looks its schema up by
// name at every call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "warpsmith/tensor_check.h"
#include "warpsmith/tensor_info.h"

// Torch's text of the last error of a C function in this thread: torch 2.13 and newer export it.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace warpsmith {

namespace detail {

inline std::string reason_of_failed_allocation(const TensorInfo& like) {
  if (torch_exception_get_what_without_backtrace != nullptr) {
    return torch_exception_get_what_without_backtrace();
  }
  return like.is_cuda() ? "CUDA out of memory" : "out of memory";
}

}  // namespace detail

// Uninitialised, on the device of `like`.
inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                            ScalarType dtype, const TensorInfo& like) {
  namespace stable = torch::stable::detail;
  AtenTensorHandle tensor = nullptr;
  // The C function loses the type of an out-of-memory error: Python restores it from the text.
  STD_TORCH_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               stable::to<int32_t>(stable::from(dtype)), like.device_type,
                               like.device_index, &tensor) == TORCH_SUCCESS,
      "cannot allocate a result of shape ", shape_string(sizes), " and dtype ", dtype_name(dtype),
      ": ", detail::reason_of_failed_allocation(like));
  return Tensor(tensor);
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  return strides;
}

// Contiguous, with the dtype of `like`.
inline Tensor empty_contiguous(const std::vector<int64_t>& sizes, const TensorInfo& like) {
  return empty_strided(sizes, contiguous_strides(sizes), like.dtype, like);
}

}  // namespace warpsmith
