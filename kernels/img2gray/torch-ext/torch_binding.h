#pragma once

#include <torch/csrc/stable/tensor.h>

namespace img2gray {

using torch::stable::Tensor;

Tensor img2gray_cpu(Tensor image, double red, double green, double blue, int64_t formula,
                    bool channels_last, bool bgr, bool keepdim);
void img2gray_out_cpu(Tensor image, double red, double green, double blue, int64_t formula,
                      bool channels_last, bool bgr, bool keepdim, Tensor out);

Tensor img2gray_cuda(Tensor image, double red, double green, double blue, int64_t formula,
                     bool channels_last, bool bgr, bool keepdim);
void img2gray_out_cuda(Tensor image, double red, double green, double blue, int64_t formula,
                       bool channels_last, bool bgr, bool keepdim, Tensor out);

// What the last call of this thread ran, for tests of forced paths: string literals and the bytes
// per memory access.
void set_last_path(const char* device, const char* arch, const char* strategy, int access_bytes);

}  // namespace img2gray
