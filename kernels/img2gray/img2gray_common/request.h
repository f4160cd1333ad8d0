// One img2gray call, checked and reduced to what a kernel loops over. Host only, shared by CPU and
// CUDA.
#pragma once

#include <cmath>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "img2gray_common/formula.h"
#include "img2gray_common/pixels.h"
#include "warpsmith/tensor_check.h"
#include "warpsmith/tensor_info.h"

namespace img2gray {

using warpsmith::ScalarType;
using warpsmith::Tensor;
using warpsmith::TensorInfo;

struct Options {
  bool channels_last;
  Formula formula;
  bool keepdim;
  bool bgr;
  Weights weights;  // of Formula::kCustom
};

inline int64_t channel_dim(const TensorInfo& image, bool channels_last) {
  return image.dim() - (channels_last ? 1 : 3);
}

inline void check_image(const TensorInfo& image, const Options& options) {
  STD_TORCH_CHECK(image.dim() >= 3, "image: must have at least 3 dims, ",
                  options.channels_last ? "[..., H, W, C]" : "[..., C, H, W]", ", got shape ",
                  warpsmith::shape_string(image.sizes));
  const int64_t channels = image.sizes[channel_dim(image, options.channels_last)];
  STD_TORCH_CHECK(channels == 1 || channels == 3 || channels == 4, "image: layout ",
                  options.channels_last ? "HWC needs 1, 3 or 4 channels in the last dim"
                                        : "CHW needs 1, 3 or 4 channels in dim -3",
                  ", got ", channels, " in shape ", warpsmith::shape_string(image.sizes));
  const ScalarType dtype = image.dtype;
  const bool integral = dtype == ScalarType::Byte || dtype == ScalarType::UInt16;
  STD_TORCH_CHECK(integral || dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Float || dtype == ScalarType::Double,
                  "image: dtype must be uint8, uint16, float16, bfloat16, float32 or float64, got ",
                  warpsmith::dtype_name(dtype));
  warpsmith::check_aligned(image, "image");
  const auto formula = static_cast<int64_t>(options.formula);
  STD_TORCH_CHECK(formula >= 0 && formula <= 4, "formula: must be 0 to 4, got ", formula);
  STD_TORCH_CHECK(options.formula != Formula::kPillow || dtype == ScalarType::Byte,
                  "weights: \"pil\" is defined for uint8 images only, got dtype ",
                  warpsmith::dtype_name(dtype));
  for (double weight : {options.weights.red, options.weights.green, options.weights.blue}) {
    STD_TORCH_CHECK(std::isfinite(static_cast<float>(weight)),
                    "weights: must be finite in float32, got ", weight);
  }
}

inline std::vector<int64_t> output_shape(const TensorInfo& image, const Options& options) {
  const int64_t channel = channel_dim(image, options.channels_last);
  std::vector<int64_t> shape;
  shape.reserve(image.sizes.size());
  for (int64_t dim = 0; dim < image.dim(); ++dim) {
    if (dim != channel) {
      shape.push_back(image.sizes[dim]);
    } else if (options.keepdim) {
      shape.push_back(1);
    }
  }
  return shape;
}

inline void check_out(const TensorInfo& out, const TensorInfo& image, const Options& options) {
  warpsmith::check_same_dtype(out, "out", image, "image");
  warpsmith::check_same_device(out, "out", image, "image");
  warpsmith::check_shape(out, "out", output_shape(image, options));
  warpsmith::check_aligned(out, "out");
  warpsmith::check_no_self_overlap(out, "out");
  warpsmith::check_no_overlap(out, "out", image, "image");
}

// A one-channel image is gray already.
inline bool copy_single_channel(const TensorInfo& image, const TensorInfo& out,
                                const Options& options) {
  const int64_t channel = channel_dim(image, options.channels_last);
  if (image.sizes[channel] != 1) return false;
  Tensor written = out.tensor;
  torch::stable::copy_(
      written, options.keepdim ? image.tensor : torch::stable::select(image.tensor, channel, 0));
  return true;
}

// The pixels of image and out: all dims but the channel.
inline PixelNest pixel_nest(const TensorInfo& image, const TensorInfo& out,
                            const Options& options) {
  const int64_t channel = channel_dim(image, options.channels_last);
  PixelNest nest;
  int64_t out_dim = 0;
  for (int64_t dim = 0; dim < image.dim(); ++dim) {
    if (dim == channel) {
      out_dim += options.keepdim ? 1 : 0;
      continue;
    }
    nest.add_dim(image.sizes[dim], {out.strides[out_dim], image.strides[dim]});
    ++out_dim;
  }
  nest.merge();
  if (nest.num_dims == 0) {  // one pixel
    nest.num_dims = 1;
    nest.sizes[0] = nest.strides[0][kOut] = nest.strides[0][kImage] = 1;
  }
  return nest;
}

}  // namespace img2gray
