// What the entry points of forward and backward share: the accesses that operands allow, and the
// report of what ran. Local to the including file, as device_info.h is.
#pragma once

#include "rmsnorm_cuda/rmsnorm_fwd.cuh"
#include "torch-ext/torch_binding.h"
#include "warpsmith/device_info.h"

namespace rmsnorm {
namespace {

const char* arch_name(int arch) { return arch == 75 ? "sm75" : arch == 80 ? "sm80" : "sm90"; }

int element_bytes(ScalarType dtype) { return dtype == warpsmith::dtype_of<float> ? 4 : 2; }

// The most elements, up to 8, that an access of every operand may have: each allows vectors of a
// power of two, and several of 16 bytes.
class AccessElements {
 public:
  explicit AccessElements(int64_t hidden) { limit(hidden); }

  // Of columns alone: weight and bias.
  void add(const void* data, ScalarType dtype, int64_t column_stride) {
    if (data == nullptr) return;
    const int bytes = element_bytes(dtype);
    if (column_stride != 1) return limit(1);
    const int vector = warpsmith::widest_vector_bytes(reinterpret_cast<uint64_t>(data));
    if (vector < kSlotBytes) limit(vector / bytes);
  }

  void add(const void* data, ScalarType dtype, int64_t column_stride, const Rows& rows,
           int operand) {
    if (data == nullptr) return;
    add(data, dtype, column_stride);
    uint64_t strides = 0;
    for (int dim = 0; dim < rows.num_dims; ++dim) strides |= rows.strides[dim][operand];
    const int bytes = element_bytes(dtype);
    const int vector = warpsmith::widest_vector_bytes(strides * bytes);
    if (vector < kSlotBytes) limit(vector / bytes);
  }

  int most() const { return warpsmith::widest_vector_bytes(allowed_ | 8); }

 private:
  void limit(int64_t multiple_of) { allowed_ |= static_cast<uint64_t>(multiple_of); }

  uint64_t allowed_ = 0;
};

// One dtype that slots hold, and accesses as wide as them.
bool fits_slots(ScalarType dtype, int access_elements) {
  return access_elements * element_bytes(dtype) >= kSlotBytes;
}

template <typename Config>
void report(const Config& config, const RowsShape& shape, int arch) {
  const bool looped = config.strategy == Strategy::kLooped;
  const int bytes = shape.access_elements * shape.element_bytes;
  set_last_path("cuda", arch_name(arch), kStrategyNames[static_cast<int>(config.strategy)],
                looped && bytes < kSlotBytes ? bytes : kSlotBytes);
}

// -0 where nothing is to be added: to a weight, or to the ones that stand for none.
template <typename Job>
float added_to_weight(const Job& job) {
  return job.weight == nullptr || job.weight_offset == 0.0f ? -0.0f : job.weight_offset;
}

}  // namespace
}  // namespace rmsnorm
