#include "rmsnorm_cuda/rmsnorm_fwd.cuh"

#include "rmsnorm_cuda/entry.cuh"

namespace rmsnorm {
namespace {

using ForwardKernel = void (*)(ForwardParams);

template <typename T, bool kAdd>
ForwardKernel registers_kernel_of(const ForwardConfig& config) {
  if (config.strategy == Strategy::kWarp) return registers_kernel<T, 2, kAdd, false>;
  return config.slots == 2 ? registers_kernel<T, 2, kAdd, true>
                           : registers_kernel<T, 4, kAdd, true>;
}

ForwardKernel kernel_of(ScalarType dtype, const RowsShape& shape, const ForwardConfig& config) {
  ForwardKernel kernel = nullptr;
  if (config.strategy == Strategy::kLooped) {
    with_access(shape.access_elements, [&](auto count) { kernel = looped_kernel<count.value>; });
    return kernel;
  }
  warpsmith::dispatch_dtype<Half, BFloat16, float>(dtype, "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    kernel =
        shape.add ? registers_kernel_of<T, true>(config) : registers_kernel_of<T, false>(config);
  });
  return kernel;
}

// Rows that one launch has no blocks for, or no 31 bits to count with, are left to the next.
void launch_forward(const ForwardParams& params, const RowsShape& shape,
                    const ForwardConfig& config, int arch, cudaStream_t stream) {
  const ForwardKernel kernel = kernel_of(params.job.x_dtype, shape, config);
  ForwardParams part = params;
  for_each_launch(params.job.rows.count, config.rows_per_block,
                  [&](int64_t first_row, int64_t num_rows, dim3 blocks) {
                    part.first_row = first_row;
                    part.num_rows = num_rows;
                    warpsmith::launch_dependent(kernel, part, blocks, config.threads, arch, stream);
                  });
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
                              job.weight != nullptr && job.x_dtype != warpsmith::dtype_of<float>;
  const bool plain = one_dtype && job.bias == nullptr && !rounded_offset;
  return {job.rows.count,
          job.hidden,
          element_bytes(job.x_dtype),
          job.residual != nullptr,
          plain && fits_slots(job.x_dtype, access.most()),
          access.most()};
}

}  // namespace

void forward_cuda(const ForwardJob& job, int device, void* stream) {
  const int arch = warpsmith::arch_path(device);
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
  launch_forward(params, shape, config, arch, static_cast<cudaStream_t>(stream));
  report(config, shape, arch);
}

}  // namespace rmsnorm
