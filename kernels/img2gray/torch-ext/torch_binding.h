#pragma once

#include "img2gray_common/request.h"

namespace img2gray {

// Checked arguments, three or four channels, at least one pixel.
void launch_cpu(const TensorInfo& image, const TensorInfo& out, const Options& options);
void launch_cuda(const TensorInfo& image, const TensorInfo& out, const Options& options);

// What the last call of this thread ran, for tests of forced paths: string literals and the bytes
// per memory access.
void set_last_path(const char* device, const char* arch, const char* strategy, int access_bytes);

}  // namespace img2gray
