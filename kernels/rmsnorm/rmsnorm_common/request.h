// One call, checked and reduced to a job. Host only, shared by CPU and CUDA.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "rmsnorm_common/job.h"
#include "warpsmith/allocate.h"
#include "warpsmith/loop_nest.h"
#include "warpsmith/memory_order.h"
#include "warpsmith/tensor_check.h"
#include "warpsmith/tensor_info.h"

namespace rmsnorm {

using warpsmith::Access;
using warpsmith::Tensor;
using warpsmith::TensorInfo;

struct Options {
  double eps;
  Rounding rounding;
  double weight_offset;
};

inline void check_options(double eps, int64_t rounding, double weight_offset) {
  STD_TORCH_CHECK(eps >= 0 && eps <= std::numeric_limits<float>::max(),
                  "eps: must be finite in float32 and not negative, got ", eps);
  STD_TORCH_CHECK(rounding >= 0 && rounding <= 2, "rounding: must be 0, 1 or 2, got ", rounding);
  STD_TORCH_CHECK(std::isfinite(static_cast<float>(weight_offset)),
                  "weight_offset: must be finite in float32, got ", weight_offset);
}

inline void check_floats(const TensorInfo& tensor, const char* name) {
  const ScalarType dtype = tensor.dtype;
  STD_TORCH_CHECK(
      dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float,
      name, ": dtype must be float16, bfloat16 or float32, got ", warpsmith::dtype_name(dtype));
  warpsmith::check_aligned(tensor, name);
}

inline void check_x(const TensorInfo& x) {
  STD_TORCH_CHECK(x.dim() >= 1, "x: must have at least 1 dim, got a scalar");
  check_floats(x, "x");
}

inline void check_same_sizes(const TensorInfo& tensor, const char* name, const TensorInfo& x) {
  warpsmith::check_shape(tensor, name, std::vector<int64_t>(x.sizes.begin(), x.sizes.end()));
  warpsmith::check_same_device(tensor, name, x, "x");
}

// residual, or what is written in x's dtype.
inline void check_like_x(const TensorInfo& tensor, const char* name, const TensorInfo& x) {
  warpsmith::check_same_dtype(tensor, name, x, "x");
  check_same_sizes(tensor, name, x);
  warpsmith::check_aligned(tensor, name);
}

inline void check_column(const TensorInfo& tensor, const char* name, const TensorInfo& x) {
  check_floats(tensor, name);
  warpsmith::check_shape(tensor, name, {x.sizes[x.dim() - 1]});
  warpsmith::check_same_device(tensor, name, x, "x");
}

inline void check_columns(const TensorInfo& x, const std::optional<TensorInfo>& weight,
                          const std::optional<TensorInfo>& bias) {
  if (weight) check_column(*weight, "weight", x);
  if (!bias) return;
  STD_TORCH_CHECK(weight.has_value(), "bias: needs a weight");
  check_column(*bias, "bias", x);
  warpsmith::check_same_dtype(*bias, "bias", *weight, "weight");
}

inline ScalarType result_dtype(const TensorInfo& x, const std::optional<TensorInfo>& weight,
                               Rounding rounding) {
  if (!weight || weight->dtype == x.dtype || rounding == Rounding::kOnce) return x.dtype;
  return rounding == Rounding::kWeightDtype ? weight->dtype : ScalarType::Float;
}

// Of torch.empty_like(x, dtype=dtype).
inline Tensor empty_like(const TensorInfo& x, ScalarType dtype) {
  const std::vector<int64_t> sizes(x.sizes.begin(), x.sizes.end());
  return warpsmith::empty_strided(
      sizes, warpsmith::memory_order_strides(x.sizes, x.strides, x.dim()), dtype, x);
}

// Of torch.empty_like(x[..., 0], dtype=torch.float32): one value for a row, in the order of x.
inline Tensor empty_rstd(const TensorInfo& x) {
  const int64_t rank = x.dim() - 1;
  const std::vector<int64_t> sizes(x.sizes.begin(), x.sizes.begin() + rank);
  return warpsmith::empty_strided(sizes, warpsmith::memory_order_strides(x.sizes, x.strides, rank),
                                  ScalarType::Float, x);
}

// Operands may be null, and rstd has one dim less.
inline Rows make_rows(const TensorInfo& x, const TensorInfo* const (&operands)[kRowOperands]) {
  warpsmith::LoopNest<kRowOperands> nest;
  Rows rows{1, 0, {}, {}};
  for (int64_t dim = x.dim() - 2; dim >= 0; --dim) {
    int64_t strides[kRowOperands];
    for (int i = 0; i < kRowOperands; ++i) {
      strides[i] = operands[i] == nullptr ? 0 : operands[i]->strides[dim];
    }
    nest.add_dim(x.sizes[dim], strides);
    rows.count *= x.sizes[dim];
  }
  nest.merge();
  STD_TORCH_CHECK(nest.num_dims <= kMaxRowDims, "x: dims before the last must merge into ",
                  kMaxRowDims, " or fewer, got ", nest.num_dims, " in shape ",
                  warpsmith::shape_string(x.sizes), " with strides ",
                  warpsmith::shape_string(x.strides));
  rows.num_dims = nest.num_dims;
  for (int dim = 0; dim < nest.num_dims; ++dim) {
    rows.sizes[dim] = nest.sizes[dim];
    for (int i = 0; i < kRowOperands; ++i) rows.strides[dim][i] = nest.strides[dim][i];
  }
  return rows;
}

// Of the elements of a row; 1 for what is absent, so as not to stand in the way of vectors.
inline int64_t column_stride(const TensorInfo* tensor) {
  return tensor == nullptr ? 1 : tensor->strides[tensor->dim() - 1];
}

template <typename T>
const T* pointer_to(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

inline ForwardJob make_forward_job(const TensorInfo& y, const TensorInfo& x,
                                   const TensorInfo* residual, const TensorInfo* residual_out,
                                   const TensorInfo* rstd, const std::optional<TensorInfo>& weight,
                                   const std::optional<TensorInfo>& bias, const Options& options) {
  const auto data = [](const TensorInfo* tensor) { return tensor ? tensor->data : nullptr; };
  ForwardJob job;
  job.x_dtype = x.dtype;
  job.weight_dtype = weight ? weight->dtype : x.dtype;
  job.y_dtype = y.dtype;
  job.y = y.data;
  job.x = x.data;
  job.residual = data(residual);
  job.residual_out = data(residual_out);
  job.rstd = static_cast<float*>(data(rstd));
  job.weight = data(pointer_to(weight));
  job.bias = data(pointer_to(bias));
  job.hidden = x.sizes[x.dim() - 1];
  job.column_strides[ForwardJob::kY] = column_stride(&y);
  job.column_strides[ForwardJob::kX] = column_stride(&x);
  job.column_strides[ForwardJob::kResidual] = column_stride(residual);
  job.column_strides[ForwardJob::kResidualOut] = column_stride(residual_out);
  job.weight_stride = column_stride(pointer_to(weight));
  job.bias_stride = column_stride(pointer_to(bias));
  job.rows = make_rows(x, {&y, &x, residual, residual_out, rstd});
  job.eps = static_cast<float>(options.eps);
  job.weight_offset = static_cast<float>(options.weight_offset);
  job.rounding = options.rounding;
  return job;
}

inline BackwardJob make_backward_job(const TensorInfo& dx, const TensorInfo& dy,
                                     const TensorInfo& x, const TensorInfo* dresidual,
                                     const TensorInfo& rstd,
                                     const std::optional<TensorInfo>& weight,
                                     double weight_offset) {
  BackwardJob job;
  job.x_dtype = x.dtype;
  job.dy_dtype = dy.dtype;
  job.weight_dtype = weight ? weight->dtype : x.dtype;
  job.dx = dx.data;
  job.dy = dy.data;
  job.x = x.data;
  job.dresidual = dresidual ? dresidual->data : nullptr;
  job.rstd = static_cast<const float*>(rstd.data);
  job.weight = weight ? weight->data : nullptr;
  job.dweight = job.dbias = nullptr;
  job.partials = nullptr;
  job.num_partials = 0;
  job.hidden = x.sizes[x.dim() - 1];
  job.column_strides[BackwardJob::kDx] = column_stride(&dx);
  job.column_strides[BackwardJob::kDy] = column_stride(&dy);
  job.column_strides[BackwardJob::kX] = column_stride(&x);
  job.column_strides[BackwardJob::kDresidual] = column_stride(dresidual);
  job.weight_stride = column_stride(pointer_to(weight));
  job.rows = make_rows(x, {&dx, &dy, &x, dresidual, &rstd});
  job.weight_offset = static_cast<float>(weight_offset);
  return job;
}

}  // namespace rmsnorm
