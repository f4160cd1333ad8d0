#include "torch_binding.h"

#include <string>

#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "warpsmith/allocate.h"
#include "warpsmith/tensor_info.h"

namespace img2gray {
namespace {

using warpsmith::Access;

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

using Launch = void(const TensorInfo&, const TensorInfo&, const Options&);

template <Launch* kLaunch>
void write(const TensorInfo& image, const TensorInfo& out, const Options& options) {
  const char* device = image.is_cuda() ? "cuda" : "cpu";
  if (out.numel() == 0) return set_last_path(device, "none", "empty", 0);
  if (copy_single_channel(image, out, options)) return set_last_path(device, "torch", "copy", 0);
  kLaunch(image, out, options);
}

template <Launch* kLaunch>
Tensor img2gray(const Tensor& image_tensor, bool channels_last, int64_t formula, bool keepdim,
                bool bgr, double red, double green, double blue) {
  const Options options{
      channels_last, static_cast<Formula>(formula), keepdim, bgr, {red, green, blue}};
  const TensorInfo image(image_tensor, Access::kRead);
  check_image(image, options);
  Tensor out = warpsmith::empty_contiguous(output_shape(image, options), image);
  write<kLaunch>(image, TensorInfo(out, Access::kWrite), options);
  return out;
}

template <Launch* kLaunch>
void img2gray_out(const Tensor& image_tensor, const Tensor& out_tensor, bool channels_last,
                  int64_t formula, bool keepdim, bool bgr, double red, double green, double blue) {
  const Options options{
      channels_last, static_cast<Formula>(formula), keepdim, bgr, {red, green, blue}};
  const TensorInfo image(image_tensor, Access::kRead);
  check_image(image, options);
  const TensorInfo out(out_tensor, Access::kWrite);
  check_out(out, image, options);
  write<kLaunch>(image, out, options);
}

}  // namespace

void set_last_path(const char* device, const char* arch, const char* strategy, int access_bytes) {
  last = {device, arch, strategy, access_bytes};
}

}  // namespace img2gray

// img2gray and img2gray_raw run the same code; autograd is registered for the first alone, the
// other two are for callers that need no gradient. To parse an argument takes 0.2 us, to leave it
// to its default next to nothing: what is given most often comes first, and named formulas bring
// their weights.
#define IMG2GRAY_OPTIONS                                                         \
  "bool channels_last=False, int formula=0, bool keepdim=True, bool bgr=False, " \
  "float red=0., float green=0., float blue=0."

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("img2gray(Tensor image, " IMG2GRAY_OPTIONS ") -> Tensor");
  ops.def("img2gray_raw(Tensor image, " IMG2GRAY_OPTIONS ") -> Tensor");
  ops.def("img2gray_out(Tensor image, Tensor(a!) out, " IMG2GRAY_OPTIONS ") -> ()");
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
