// CPU entry point: choice of the instruction set, threads.
#include "img2gray_cpu/img2gray_job.h"
#include "torch-ext/torch_binding.h"
#include "warpsmith/cpu/isa.h"

namespace img2gray {
namespace {

// Pixels that are worth a thread of their own: about 20 us of work for uint8 with AVX-512.
constexpr int64_t kPixelsPerThread = int64_t{1} << 16;

}  // namespace

void launch_cpu(const TensorInfo& image, const TensorInfo& out, const Options& options) {
  const int64_t channel = channel_dim(image, options.channels_last);
  GrayJob job{image.dtype,
              image.data,
              out.data,
              pixel_nest(image, out, options),
              RowLayout::kStrided,
              image.sizes[channel],
              image.strides[channel],
              options};
  job.layout = row_layout(job.nest, job.channels, job.channel_stride);

  auto range = gray_range_baseline;
  const warpsmith::Isa isa = warpsmith::cpu_isa();
#if WARPSMITH_HAS_X86_ISAS
  if (isa == warpsmith::Isa::kAvx2) range = gray_range_avx2;
  if (isa == warpsmith::Isa::kAvx512) range = gray_range_avx512;
#endif
  torch::stable::parallel_for(0, out.numel(), kPixelsPerThread,
                              [&](int64_t begin, int64_t end) { range(job, begin, end); });
  set_last_path("cpu", warpsmith::kIsaNames[static_cast<int>(isa)],
                kRowLayoutNames[static_cast<int>(job.layout)], 0);
}

}  // namespace img2gray
