// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// The iteration space shared by several strided operands, in its shortest form: dims of size 1
// dropped, dims ordered by stride (innermost first), neighbours merged wherever every operand
// allows. Host only; sizes and strides count elements.
#pragma once

#include <cstdint>

#include <torch/headeronly/util/Exception.h>

namespace warpsmith {

// Dims of size >= 2 that an iteration space can have: 2^40 elements are more than any output holds.
inline constexpr int kMaxLoopDims = 40;

template <int kOperands>
struct LoopNest {
  int num_dims = 0;
  int64_t sizes[kMaxLoopDims];
  int64_t strides[kMaxLoopDims][kOperands];

  void add_dim(int64_t size, const int64_t (&dim_strides)[kOperands]) {
    if (size == 1) return;
    STD_TORCH_CHECK(num_dims < kMaxLoopDims, "more than ", kMaxLoopDims, " dims of size above 1");
    int at = num_dims++;
    for (; at > 0 && outer_to(strides[at - 1], dim_strides); --at) move_dim(at - 1, at);
    sizes[at] = size;
    for (int i = 0; i < kOperands; ++i) strides[at][i] = dim_strides[i];
  }

  void merge() {
    int last = 0;
    for (int dim = 1; dim < num_dims; ++dim) {
      bool mergeable = true;
      for (int i = 0; i < kOperands; ++i) {
        mergeable = mergeable && strides[dim][i] == strides[last][i] * sizes[last];
      }
      if (mergeable) {
        sizes[last] *= sizes[dim];
      } else if (++last != dim) {
        move_dim(dim, last);
      }
    }
    if (num_dims > 0) num_dims = last + 1;
  }

 private:
  // The first operand decides, the others break ties.
  static bool outer_to(const int64_t (&a)[kOperands], const int64_t (&b)[kOperands]) {
    for (int i = 0; i < kOperands; ++i) {
      if (a[i] != b[i]) return a[i] > b[i];
    }
    return false;
  }

  void move_dim(int from, int to) {
    sizes[to] = sizes[from];
    for (int i = 0; i < kOperands; ++i) strides[to][i] = strides[from][i];
  }
};

}  // namespace warpsmith
