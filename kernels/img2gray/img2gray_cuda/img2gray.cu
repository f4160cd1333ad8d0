// CUDA entry point: strategy, launch on the current stream of the image's device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "warpsmith/device_info.h"

#include "img2gray_common/request.h"
#include "img2gray_cuda/img2gray_fwd.cuh"
#include "torch-ext/torch_binding.h"

namespace img2gray {
namespace {

const char* arch_name(int arch) { return arch == 75 ? "sm75" : arch == 80 ? "sm80" : "sm90"; }

template <typename T>
void launch_typed(const Tensor& image, Tensor& out, const Options& options) {
  const int64_t channel = channel_dim(image, options.channels_last);
  const int64_t channels = image.size(channel), channel_stride = image.stride(channel);
  GrayParams<T> params{static_cast<const T*>(image.const_data_ptr()),
                       static_cast<T*>(out.mutable_data_ptr()),
                       pixel_nest(image, out, options),
                       1,
                       channel_stride,
                       0,
                       0,
                       options.bgr ? 2 : 0,
                       0x4b000000u,
                       make_math<T>(options.formula, options.red, options.green, options.blue)};
  const PixelNest& nest = params.nest;
  const RowLayout layout = row_layout(nest, channels, channel_stride);
  uint64_t bits = reinterpret_cast<uint64_t>(params.image) | reinterpret_cast<uint64_t>(params.out);
  if (layout == RowLayout::kPlanar) bits |= static_cast<uint64_t>(channel_stride) * sizeof(T);
  for (int dim = 1; dim < nest.num_dims; ++dim) {
    params.num_rows *= nest.sizes[dim];
    bits |= static_cast<uint64_t>(nest.strides[dim][kOut] | nest.strides[dim][kImage]) * sizeof(T);
  }
  params.tiles_per_row = static_cast<uint32_t>(warpsmith::ceil_div(nest.sizes[0], kTilePixels<T>));
  params.num_tiles = static_cast<uint32_t>(params.num_rows) * params.tiles_per_row;

  const int device = image.get_device_index();
  const int arch = warpsmith::arch_path(device);
  const GrayConfig config = choose_config(
      {layout, channels, nest.sizes[0], params.num_rows, static_cast<int>(sizeof(T)),
       warpsmith::widest_vector_bytes(bits)},
      warpsmith::shared_memory_limit(arch, warpsmith::device_info(device).shared_memory));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  launch_gray(params, config, static_cast<cudaStream_t>(stream));
  set_last_path("cuda", arch_name(arch), kStrategyNames[static_cast<int>(config.strategy)],
                config.access_bytes);
}

}  // namespace

void launch_cuda(const Tensor& image, Tensor& out, const Options& options) {
  const torch::stable::accelerator::DeviceGuard guard(image.get_device_index());
  warpsmith::dispatch_dtype<uint8_t, uint16_t, Half, BFloat16, float, double>(
      image.scalar_type(), "image",
      [&](auto tag) { launch_typed<typename decltype(tag)::type>(image, out, options); });
}

}  // namespace img2gray
