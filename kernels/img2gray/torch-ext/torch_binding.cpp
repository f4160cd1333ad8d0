#include "torch_binding.h"

#include <string>

#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "warpsmith/allocate.h"

namespace img2gray {
namespace {

struct Path {
  const char* device;
  const char* arch;
  const char* strategy;
  int access_bytes;
};

thread_local Path last{"none", "", "", 0};

std::string last_path() {
  return std::string(last.device) + ' ' + last.arch + ' ' + last.strategy + ' ' +
         std::to_string(last.access_bytes);
}

using Launch = void(const Tensor&, Tensor&, const Options&);

template <Launch* kLaunch>
void write(const Tensor& image, Tensor& out, const Options& options) {
  const char* device = image.is_cuda() ? "cuda" : "cpu";
  if (out.numel() == 0) return set_last_path(device, "none", "empty", 0);
  if (copy_single_channel(image, out, options)) return set_last_path(device, "torch", "copy", 0);
  kLaunch(image, out, options);
}

template <Launch* kLaunch>
Tensor img2gray(Tensor image, double red, double green, double blue, int64_t formula,
                bool channels_last, bool bgr, bool keepdim) {
  const Options options{
      static_cast<Formula>(formula), red, green, blue, channels_last, bgr, keepdim};
  check_image(image, options);
  Tensor out = warpsmith::empty_contiguous(output_shape(image, options), image);
  write<kLaunch>(image, out, options);
  return out;
}

template <Launch* kLaunch>
void img2gray_out(Tensor image, double red, double green, double blue, int64_t formula,
                  bool channels_last, bool bgr, bool keepdim, Tensor out) {
  const Options options{
      static_cast<Formula>(formula), red, green, blue, channels_last, bgr, keepdim};
  check_image(image, options);
  check_out(out, image, options);
  write<kLaunch>(image, out, options);
}

}  // namespace

void set_last_path(const char* device, const char* arch, const char* strategy, int access_bytes) {
  last = {device, arch, strategy, access_bytes};
}

}  // namespace img2gray

// img2gray and img2gray_raw run the same code; autograd is registered for the first alone, the
// other two are for callers that need no gradient.
STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "img2gray(Tensor image, float red, float green, float blue, int formula, bool channels_last, "
      "bool bgr, bool keepdim) -> Tensor");
  ops.def(
      "img2gray_raw(Tensor image, float red, float green, float blue, int formula, bool "
      "channels_last, bool bgr, bool keepdim) -> Tensor");
  ops.def(
      "img2gray_out(Tensor image, float red, float green, float blue, int formula, bool "
      "channels_last, bool bgr, bool keepdim, Tensor(a!) out) -> ()");
  ops.def("last_path() -> str");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("last_path", TORCH_BOX(&img2gray::last_path));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("img2gray", TORCH_BOX(&img2gray::img2gray<img2gray::launch_cpu>));
  ops.impl("img2gray_raw", TORCH_BOX(&img2gray::img2gray<img2gray::launch_cpu>));
  ops.impl("img2gray_out", TORCH_BOX(&img2gray::img2gray_out<img2gray::launch_cpu>));
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("img2gray", TORCH_BOX(&img2gray::img2gray<img2gray::launch_cuda>));
  ops.impl("img2gray_raw", TORCH_BOX(&img2gray::img2gray<img2gray::launch_cuda>));
  ops.impl("img2gray_out", TORCH_BOX(&img2gray::img2gray_out<img2gray::launch_cuda>));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
