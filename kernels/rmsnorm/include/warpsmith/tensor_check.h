// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Argument checks shared by all ops. Messages name the argument, the rule and the value received.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <torch/headeronly/util/Exception.h>

#include "warpsmith/tensor_info.h"

namespace warpsmith {

template <typename Sizes>
std::string shape_string(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << ']';
  return text.str();
}

// As Python writes it.
inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string device_string(const TensorInfo& tensor) {
  std::ostringstream text;
  text << (tensor.is_cuda() ? "cuda" : tensor.is_cpu() ? "cpu" : "another device");
  if (tensor.is_cuda()) text << ':' << tensor.device_index;
  return text.str();
}

inline void check_same_device(const TensorInfo& tensor, const char* name,
                              const TensorInfo& reference, const char* reference_name) {
  const bool same =
      tensor.device_type == reference.device_type && tensor.device_index == reference.device_index;
  STD_TORCH_CHECK(same, name, ": must be on the device of ", reference_name, ", ",
                  device_string(reference), ", got ", device_string(tensor));
}

inline void check_same_dtype(const TensorInfo& tensor, const char* name,
                             const TensorInfo& reference, const char* reference_name) {
  STD_TORCH_CHECK(tensor.dtype == reference.dtype, name, ": must have the dtype of ",
                  reference_name, ", ", dtype_name(reference.dtype), ", got ",
                  dtype_name(tensor.dtype));
}

inline void check_shape(const TensorInfo& tensor, const char* name,
                        const std::vector<int64_t>& expected) {
  const bool same =
      std::equal(tensor.sizes.begin(), tensor.sizes.end(), expected.begin(), expected.end());
  STD_TORCH_CHECK(same, name, ": must have shape ", shape_string(expected), ", got ",
                  shape_string(tensor.sizes));
}

// Imported buffers can start anywhere; code reads elements, which must not straddle.
inline void check_aligned(const TensorInfo& tensor, const char* name) {
  const uint64_t address = reinterpret_cast<uint64_t>(tensor.data);
  const uint64_t left = address % static_cast<uint64_t>(tensor.element_size);
  STD_TORCH_CHECK(left == 0, name, ": must start at a multiple of its element size, ",
                  tensor.element_size, " bytes, got an address that leaves ", left);
}

namespace detail {

inline int64_t gcd(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Dims with a stride below `threshold` span an interval; the others step by multiples of `step`.
struct Footprint {
  int64_t span;
  int64_t step;
};

inline Footprint footprint(const TensorInfo& tensor, int64_t threshold) {
  Footprint result{tensor.element_size, 0};
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t size = tensor.sizes[dim], stride = tensor.strides[dim] * tensor.element_size;
    if (size == 1) continue;
    if (stride < threshold) {
      result.span += (size - 1) * stride;
    } else {
      result.step = gcd(stride, result.step);
    }
  }
  return result;
}

}  // namespace detail

// Whether two non-empty tensors may share a byte. Interleaved views of one buffer (channels,
// planes, columns) are told apart: at some stride of theirs, both stay within fixed, disjoint
// intervals of every period.
inline bool may_overlap(const TensorInfo& a, const TensorInfo& b) {
  const int64_t begin_a = reinterpret_cast<int64_t>(a.data);
  const int64_t begin_b = reinterpret_cast<int64_t>(b.data);
  const auto disjoint_at = [&](int64_t threshold) {
    const detail::Footprint fa = detail::footprint(a, threshold);
    const detail::Footprint fb = detail::footprint(b, threshold);
    const int64_t period = detail::gcd(fa.step, fb.step);
    if (period == 0) return begin_a + fa.span <= begin_b || begin_b + fb.span <= begin_a;
    const int64_t offset = ((begin_b - begin_a) % period + period) % period;
    return fa.span <= offset && offset + fb.span <= period;
  };
  if (disjoint_at(INT64_MAX)) return false;
  for (const TensorInfo* tensor : {&a, &b}) {
    for (int64_t dim = 0; dim < tensor->dim(); ++dim) {
      const int64_t stride = tensor->strides[dim] * tensor->element_size;
      if (tensor->sizes[dim] > 1 && stride > 0 && disjoint_at(stride)) return false;
    }
  }
  return true;
}

inline void check_no_overlap(const TensorInfo& written, const char* name, const TensorInfo& read,
                             const char* read_name) {
  if (written.numel() == 0 || read.numel() == 0) return;
  STD_TORCH_CHECK(!may_overlap(written, read), name, ": must not share memory with ", read_name);
}

// Every element of a tensor that is written must have memory of its own. Sufficient condition:
// sorted by stride, each dim steps past all the smaller ones.
inline void check_no_self_overlap(const TensorInfo& written, const char* name) {
  if (written.numel() == 0) return;
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < written.dim(); ++dim) {
    if (written.sizes[dim] == 1) continue;
    auto at = dims.begin();
    while (at != dims.end() && written.strides[*at] < written.strides[dim]) ++at;
    dims.insert(at, dim);
  }
  int64_t extent = 1;
  for (int64_t dim : dims) {
    STD_TORCH_CHECK(written.strides[dim] >= extent, name,
                    ": every element must have memory of its own, got strides ",
                    shape_string(written.strides), " for shape ", shape_string(written.sizes));
    extent += (written.sizes[dim] - 1) * written.strides[dim];
  }
}

}  // namespace warpsmith
