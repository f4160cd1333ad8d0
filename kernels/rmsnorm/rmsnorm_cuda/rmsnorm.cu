// CUDA entry points: strategy, launch on the current stream of the device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "rmsnorm_cuda/rmsnorm_bwd.cuh"
#include "torch-ext/torch_binding.h"
#include "warpsmith/device_guard.h"
#include "warpsmith/device_info.h"

namespace rmsnorm {
namespace {

const char* arch_name(int arch) { return arch == 75 ? "sm75" : arch == 80 ? "sm80" : "sm90"; }

int element_bytes(ScalarType dtype) { return dtype == ScalarType::Float ? 4 : 2; }

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

RowsShape shape_of(const ForwardJob& job) {
  using Job = ForwardJob;
  AccessElements access(job.hidden);
  access.add(job.y, job.y_dtype, job.column_strides[Job::kY], job.rows, Job::kY);
  access.add(job.x, job.x_dtype, job.column_strides[Job::kX], job.rows, Job::kX);
  access.add(job.residual, job.x_dtype, job.column_strides[Job::kResidual], job.rows,
             Job::kResidual);
  access.add(job.residual_out, job.x_dtype, job.column_strides[Job::kResidualOut], job.rows,
             Job::kResidualOut);
  access.add(job.weight, job.weight_dtype, job.weight_stride);
  access.add(job.bias, job.weight_dtype, job.bias_stride);
  const bool one_dtype = job.y_dtype == job.x_dtype && job.weight_dtype == job.x_dtype;
  // Rounded values are multiplied in the dtype of the weight, which may not hold it with an offset.
  const bool rounded_offset = job.rounding != Rounding::kOnce && job.weight_offset != 0.0f &&
                              job.weight != nullptr && job.x_dtype != ScalarType::Float;
  const bool plain = one_dtype && job.bias == nullptr && !rounded_offset;
  return {job.rows.count,
          job.hidden,
          element_bytes(job.x_dtype),
          job.residual != nullptr,
          plain && fits_slots(job.x_dtype, access.most()),
          access.most()};
}

RowsShape shape_of(const BackwardJob& job) {
  using Job = BackwardJob;
  AccessElements access(job.hidden);
  access.add(job.dx, job.x_dtype, job.column_strides[Job::kDx], job.rows, Job::kDx);
  access.add(job.dy, job.dy_dtype, job.column_strides[Job::kDy], job.rows, Job::kDy);
  access.add(job.x, job.x_dtype, job.column_strides[Job::kX], job.rows, Job::kX);
  access.add(job.dresidual, job.x_dtype, job.column_strides[Job::kDresidual], job.rows,
             Job::kDresidual);
  access.add(job.weight, job.weight_dtype, job.weight_stride);
  const bool one_dtype = job.dy_dtype == job.x_dtype && job.weight_dtype == job.x_dtype;
  return {job.rows.count,
          job.hidden,
          element_bytes(job.x_dtype),
          false,
          one_dtype && job.dbias == nullptr && fits_slots(job.x_dtype, access.most()),
          access.most()};
}

struct Launch {
  int arch;
  cudaStream_t stream;

  explicit Launch(int device) : arch(warpsmith::arch_path(device)) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

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

BackwardConfig config_of(const RowsShape& shape, int device) {
  return choose_backward(shape, warpsmith::device_info(device).multiprocessors);
}

}  // namespace

void forward_cuda(const ForwardJob& job, int device) {
  const warpsmith::DeviceGuard guard(device);
  const Launch launch(device);
  const RowsShape shape = shape_of(job);
  const ForwardConfig config = choose_forward(shape);
  const ForwardParams params{job,
                             0,
                             0,
                             config.group,
                             static_cast<int>(job.hidden * shape.element_bytes / kSlotBytes),
                             job.rounding != Rounding::kOnce,
                             1.0f / static_cast<float>(job.hidden),
                             added_to_weight(job)};
  launch_forward(params, shape, config, launch.arch, launch.stream);
  report(config, shape, launch.arch);
}

int64_t count_partials_cuda(const BackwardJob& job, int device) {
  const warpsmith::DeviceGuard guard(device);
  return config_of(shape_of(job), device).partials;
}

void backward_cuda(const BackwardJob& job, int device) {
  const warpsmith::DeviceGuard guard(device);
  const Launch launch(device);
  const RowsShape shape = shape_of(job);
  const BackwardConfig config = config_of(shape, device);
  BackwardParams params{job,
                        0,
                        0,
                        config.group,
                        static_cast<int>(job.hidden * shape.element_bytes / kSlotBytes),
                        1.0f / static_cast<float>(job.hidden),
                        added_to_weight(job),
                        {}};
  for (int i = 0; i < kRowOperands; ++i) {
    params.row_steps[i] = config.partials * config.rows_per_block * job.rows.strides[0][i];
  }
  launch_backward(params, shape, config, launch.arch, launch.stream);
  report(config, shape, launch.arch);
}

}  // namespace rmsnorm
