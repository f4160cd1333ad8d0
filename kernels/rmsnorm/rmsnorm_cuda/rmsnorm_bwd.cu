#include "rmsnorm_cuda/rmsnorm_bwd.cuh"

#include "rmsnorm_cuda/entry.cuh"

namespace rmsnorm {
namespace {

using BackwardKernel = void (*)(BackwardParams);

// Sums of columns over the part of the rows that is the block's along y.
__global__ void __launch_bounds__(kColumnThreads)
    columns_kernel(const __grid_constant__ BackwardParams p) {
  const BackwardJob& job = p.job;
  const int64_t column = int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
  const int64_t per_block = warpsmith::ceil_div(job.rows.count, gridDim.y);
  const int64_t begin = blockIdx.y * per_block;
  const int64_t end = begin + per_block < job.rows.count ? begin + per_block : job.rows.count;
  warpsmith::wait_for_previous_kernel();
  if (column >= job.hidden) return;
  CompensatedSum dweight, dbias;
  for (int64_t row = begin; row < end; ++row) {
    int64_t offsets[kRowOperands];
    find_row(job.rows, 0, row, offsets);
    float dy[1], x[1];
    load_as(job.dy_dtype, job.dy,
            offsets[BackwardJob::kDy] + column * job.column_strides[BackwardJob::kDy], dy);
    load_as(job.x_dtype, job.x,
            offsets[BackwardJob::kX] + column * job.column_strides[BackwardJob::kX], x);
    dweight.add(dy[0] * (x[0] * job.rstd[offsets[BackwardJob::kRstd]]));
    dbias.add(dy[0]);
  }
  const bool both = job.dweight != nullptr && job.dbias != nullptr;
  float* to = job.partials + (both ? 2 : 1) * blockIdx.y * job.hidden + column;
  to[0] = (job.dweight != nullptr ? dweight : dbias).value();
  if (both) to[job.hidden] = dbias.value();
}

template <typename T>
BackwardKernel registers_kernel_of(const BackwardConfig& config) {
  if (config.strategy == Strategy::kWarp) return registers_backward_kernel<T, 2, false>;
  return config.slots == 2 ? registers_backward_kernel<T, 2, true>
                           : registers_backward_kernel<T, 4, true>;
}

BackwardKernel kernel_of(ScalarType dtype, const RowsShape& shape, const BackwardConfig& config) {
  BackwardKernel kernel = nullptr;
  if (config.strategy == Strategy::kLooped) {
    with_access(shape.access_elements,
                [&](auto count) { kernel = looped_backward_kernel<count.value>; });
    return kernel;
  }
  warpsmith::dispatch_dtype<Half, BFloat16, float>(dtype, "x", [&](auto tag) {
    kernel = registers_kernel_of<typename decltype(tag)::type>(config);
  });
  return kernel;
}

void launch_backward(const BackwardParams& params, const RowsShape& shape,
                     const BackwardConfig& config, int arch, cudaStream_t stream) {
  const BackwardJob& job = params.job;
  const bool sums = job.dweight != nullptr || job.dbias != nullptr;
  const BackwardKernel kernel = kernel_of(job.x_dtype, shape, config);
  const auto launch = [&](BackwardKernel any_kernel, const BackwardParams& part, dim3 blocks,
                          unsigned int threads) {
    warpsmith::launch_dependent(any_kernel, part, blocks, threads, arch, stream);
  };
  if (config.strategy == Strategy::kLooped) {
    BackwardParams part = params;
    for_each_launch(job.rows.count, config.rows_per_block,
                    [&](int64_t first_row, int64_t num_rows, dim3 blocks) {
                      part.first_row = first_row;
                      part.num_rows = num_rows;
                      launch(kernel, part, blocks, config.threads);
                    });
    if (sums) {
      const dim3 blocks(warpsmith::grid_blocks(job.hidden, kColumnThreads),
                        static_cast<unsigned int>(config.partials));
      launch(columns_kernel, params, blocks, kColumnThreads);
    }
  } else {
    launch(kernel, params, dim3(static_cast<unsigned int>(config.partials)), config.threads);
  }
  if (!sums) return;
  const int64_t width = job.hidden * (job.dweight != nullptr && job.dbias != nullptr ? 2 : 1);
  // More threads for a column where there are few columns.
  if (width >= 2048) {
    launch(sum_partials_kernel<32>, params, dim3(warpsmith::grid_blocks(width, 32)), kSumThreads);
  } else {
    launch(sum_partials_kernel<8>, params, dim3(warpsmith::grid_blocks(width, 8)), kSumThreads);
  }
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

BackwardConfig config_of(const RowsShape& shape, int device) {
  return choose_backward(shape, warpsmith::device_info(device).multiprocessors);
}

}  // namespace

int64_t count_partials_cuda(const BackwardJob& job, int device) {
  return config_of(shape_of(job), device).partials;
}

void backward_cuda(const BackwardJob& job, int device, void* stream) {
  const int arch = warpsmith::arch_path(device);
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
  launch_backward(params, shape, config, arch, static_cast<cudaStream_t>(stream));
  report(config, shape, arch);
}

}  // namespace rmsnorm
