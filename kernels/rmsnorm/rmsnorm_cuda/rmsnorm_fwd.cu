#include "rmsnorm_cuda/rmsnorm_fwd.cuh"

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

}  // namespace

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

}  // namespace rmsnorm
