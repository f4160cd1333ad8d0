// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// What an op asks of a tensor, asked once: each question crosses the stable ABI, and the host's
// time is what small tensors cost.
#pragma once

#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "warpsmith/dispatch.h"

namespace warpsmith {

using torch::stable::Tensor;

static_assert(dtype_of<uint8_t> == ScalarType::Byte && dtype_of<Half> == ScalarType::Half &&
              dtype_of<float> == ScalarType::Float && dtype_of<double> == ScalarType::Double &&
              dtype_of<BFloat16> == ScalarType::BFloat16 &&
              dtype_of<uint16_t> == ScalarType::UInt16);

enum class Access { kRead, kWrite };

// Valid as long as the tensor is alive and not resized.
struct TensorInfo {
  const Tensor& tensor;
  ScalarType dtype;
  int64_t element_size;
  int32_t device_type, device_index;  // as the C functions number them
  torch::headeronly::IntHeaderOnlyArrayRef sizes, strides;
  void* data;  // may be written if it was asked for with kWrite

  TensorInfo(const Tensor& asked, Access access)
      : tensor(asked),
        dtype(asked.scalar_type()),
        element_size(static_cast<int64_t>(asked.element_size())),
        device_type(0),
        device_index(asked.get_device_index()),
        sizes(asked.sizes()),
        strides(asked.strides().data(), sizes.size()),
        data(access == Access::kWrite ? asked.mutable_data_ptr()
                                      : const_cast<void*>(asked.const_data_ptr())) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(asked.get(), &device_type));
  }

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes) count *= size;
    return count;
  }

  bool is_cuda() const { return device_type == aoti_torch_device_type_cuda(); }
  bool is_cpu() const { return device_type == aoti_torch_device_type_cpu(); }
};

}  // namespace warpsmith
