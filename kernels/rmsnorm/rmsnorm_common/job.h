// What a kernel gets: checked operands, with their rows in the shortest form. Strides count
// elements. Host and device, no torch headers beyond dtypes.
//
// Forward, for every row of x of length `hidden`, all in fp32 until a rounding is named:
//   v    = x, or x + residual rounded to their dtype, which is what residual_out gets
//   rstd = 1 / sqrt(sum(v * v) / hidden + eps)
//   n    = v * rstd
//   w    = weight + weight_offset, where there is a weight
//   y    = kOnce         n * w + bias, rounded to the dtype of x
//          kInputDtype   n rounded to the dtype of x; times w, rounded to y's dtype; plus bias,
//                        rounded to y's dtype, which is that of promotion
//          kWeightDtype  n rounded to the dtype of weight; times w, rounded; plus bias, rounded;
//          all
//                        to y's dtype, which is that of weight
//   Without weight, y is n rounded to the dtype of x.
//
// Backward, roundings counted as identities, with g = dy * w:
//   dx      = rstd * (g - n * sum(g * n) / hidden) + dresidual, rounded once
//   dweight = sum over rows of dy * n, dbias = sum over rows of dy; fp32, rounded once
#pragma once

#include <cstdint>

#include "warpsmith/dispatch.h"

namespace rmsnorm {

using warpsmith::BFloat16;
using warpsmith::Half;
using warpsmith::ScalarType;

enum class Rounding : int { kOnce = 0, kInputDtype = 1, kWeightDtype = 2 };

inline constexpr int kMaxRowDims = 8;
inline constexpr int kRowOperands = 5;

// Rows in the order of memory of the first operand; row i has the offset that its position in the
// dims, innermost first, gives.
struct Rows {
  int64_t count;
  int num_dims;
  int64_t sizes[kMaxRowDims];
  int64_t strides[kMaxRowDims][kRowOperands];
};

struct ForwardJob {
  enum Operand { kY, kX, kResidual, kResidualOut, kRstd };

  ScalarType x_dtype;       // of residual and residual_out too
  ScalarType weight_dtype;  // of bias too; x_dtype without weight
  ScalarType y_dtype;
  void* y;
  const void* x;
  const void* residual;  // or null, with residual_out
  void* residual_out;
  float* rstd;         // or null
  const void* weight;  // or null
  const void* bias;    // or null
  int64_t hidden;
  int64_t column_strides[4];  // of y, x, residual, residual_out
  int64_t weight_stride, bias_stride;
  Rows rows;
  float eps, weight_offset;
  Rounding rounding;
};

struct BackwardJob {
  enum Operand { kDx, kDy, kX, kDresidual, kRstd };

  ScalarType x_dtype;  // of dx and dresidual too
  ScalarType dy_dtype;
  ScalarType weight_dtype;  // of dweight and dbias too; x_dtype without weight
  void* dx;
  const void* dy;
  const void* x;          // v of the forward
  const void* dresidual;  // or null
  const float* rstd;
  const void* weight;  // or null
  void* dweight;       // or null; contiguous, as dbias
  void* dbias;         // or null
  float* partials;     // [num_partials, dweight and dbias as far as wanted, hidden]
  int64_t num_partials;
  int64_t hidden;
  int64_t column_strides[4];  // of dx, dy, x, dresidual
  int64_t weight_stride;
  Rows rows;
  float weight_offset;
};

}  // namespace rmsnorm
