// CUDA entry point: strategy, launch on the current stream of the image's device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "warpsmith/device_guard.h"
#include "warpsmith/device_info.h"

#include "img2gray_common/request.h"
#include "img2gray_cuda/img2gray_fwd.cuh"
#include "torch-ext/torch_binding.h"

namespace img2gray {
namespace {

const char* arch_name(int arch) { return arch == 75 ? "sm75" : arch == 80 ? "sm80" : "sm90"; }

template <typename T>
void launch_typed(const TensorInfo& image, const TensorInfo& out, const Options& options) {
  const int64_t channel = channel_dim(image, options.channels_last);
  const int64_t channels = image.sizes[channel], channel_stride = image.strides[channel];
  GrayParams<T> params;
  params.image = static_cast<const T*>(image.data);
  for (int k = 0; k < 3; ++k) {
    params.channels[k] = params.image + (options.bgr ? 2 - k : k) * channel_stride;
  }
  params.out = static_cast<T*>(out.data);
  params.nest = pixel_nest(image, out, options);
  params.math = make_math<T>(options.formula, options.weights);
  scale_weights(params.math);
  params.two_to_23 = 0x4b000000u;

  const PixelNest& nest = params.nest;
  const RowLayout layout = row_layout(nest, channels, channel_stride);
  params.row_length = nest.sizes[0];
  params.num_rows = 1;
  uint64_t bits = reinterpret_cast<uint64_t>(params.image) | reinterpret_cast<uint64_t>(params.out);
  if (layout == RowLayout::kPlanar) bits |= static_cast<uint64_t>(channel_stride) * sizeof(T);
  for (int dim = 1; dim < nest.num_dims; ++dim) {
    params.num_rows *= nest.sizes[dim];
    bits |= static_cast<uint64_t>(nest.strides[dim][kOut] | nest.strides[dim][kImage]) * sizeof(T);
  }
  for (int k = 0; k < 2; ++k) {
    for (int i = 0; i < kNumOperands; ++i) {
      params.row_strides[k][i] = nest.num_dims > 1 + k ? nest.strides[1 + k][i] : 0;
    }
  }
  params.nested_z = nest.num_dims > 3;
  const int64_t inner_rows = nest.num_dims > 1 ? nest.sizes[1] : 1;
  params.rows_along_y = static_cast<uint32_t>(inner_rows);

  const int device = image.device_index;
  const int arch = warpsmith::arch_path(device);
  const warpsmith::DeviceInfo& info = warpsmith::device_info(device);
  const GrayConfig config = choose_config(
      {layout, channels, params.row_length, params.num_rows, inner_rows,
       static_cast<int>(sizeof(T)), warpsmith::widest_vector_bytes(bits)},
      {warpsmith::shared_memory_limit(arch, info.shared_memory), info.multiprocessors});
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  launch_gray(params, config, static_cast<cudaStream_t>(stream));
  set_last_path("cuda", arch_name(arch), kStrategyNames[static_cast<int>(config.strategy)],
                config.access_bytes);
}

}  // namespace

void launch_cuda(const TensorInfo& image, const TensorInfo& out, const Options& options) {
  const warpsmith::DeviceGuard guard(image.device_index);
  warpsmith::dispatch_dtype<uint8_t, uint16_t, Half, BFloat16, float, double>(
      image.dtype, "image",
      [&](auto tag) { launch_typed<typename decltype(tag)::type>(image, out, options); });
}

}  // namespace img2gray
