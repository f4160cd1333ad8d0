// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Strides of results that keep the order of memory of an input, as elementwise torch ops do:
// those of torch.empty_like().
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace warpsmith {

// Whether the elements fill their memory, each its own: sorted, a stride is the product of the
// sizes before it. For the first `rank` dims, none empty.
template <typename Sizes>
bool is_dense(const Sizes& sizes, const Sizes& strides, int64_t rank) {
  int64_t elements = 1, filled = 1;
  for (int64_t dim = 0; dim < rank; ++dim) elements *= sizes[dim];
  for (int64_t dim = 0; dim < rank; ++dim) {
    for (int64_t i = 0; i < rank; ++i) {
      if (sizes[i] > 1 && strides[i] == filled) {
        filled *= sizes[i];
        break;
      }
    }
  }
  return filled == elements;
}

// For the first `rank` dims: their own strides if they are dense or empty. Otherwise dims are
// ordered by stride, of equal ones the smaller dim inside, and packed; a stride of 0 compares with
// nothing.
template <typename Sizes>
std::vector<int64_t> memory_order_strides(const Sizes& sizes, const Sizes& strides, int64_t rank) {
  std::vector<int64_t> result(strides.begin(), strides.begin() + rank);
  for (int64_t dim = 0; dim < rank; ++dim) {
    if (sizes[dim] == 0) return result;
  }
  if (is_dense(sizes, strides, rank)) return result;
  std::vector<int64_t> inner_first;
  for (int64_t dim = rank - 1; dim >= 0; --dim) {
    inner_first.push_back(dim);
    int64_t at = static_cast<int64_t>(inner_first.size()) - 1;
    for (int64_t i = at - 1; i >= 0; --i) {
      const int64_t inner = inner_first[i];
      if (strides[inner] == 0 || strides[dim] == 0) continue;
      if (strides[inner] < strides[dim]) break;
      if (strides[inner] == strides[dim] && sizes[inner] <= sizes[dim]) continue;
      std::swap(inner_first[i], inner_first[at]);
      at = i;
    }
  }
  int64_t stride = 1;
  for (int64_t dim : inner_first) {
    result[dim] = stride;
    if (sizes[dim] > 1) stride *= sizes[dim];
  }
  return result;
}

}  // namespace warpsmith
