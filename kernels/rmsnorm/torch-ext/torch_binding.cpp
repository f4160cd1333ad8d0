#include "torch_binding.h"

#include <string>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "registration.h"
#include "rmsnorm_common/request.h"
#if defined(CUDA_KERNEL)
#include "warpsmith/device_guard.h"
#endif

namespace rmsnorm {
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

struct Cpu {
  static constexpr const char* kName = "cpu";
  static void forward(const ForwardJob& job, int) { forward_cpu(job); }
  static int64_t count_partials(const BackwardJob& job, int) { return count_partials_cpu(job); }
  static void backward(const BackwardJob& job, int) { backward_cpu(job); }
};

#if defined(CUDA_KERNEL)
struct Cuda {
  static constexpr const char* kName = "cuda";
  static void forward(const ForwardJob& job, int device) {
    const warpsmith::DeviceGuard guard(device);
    forward_cuda(job, device, current_stream(device));
  }
  static int64_t count_partials(const BackwardJob& job, int device) {
    const warpsmith::DeviceGuard guard(device);
    return count_partials_cuda(job, device);
  }
  static void backward(const BackwardJob& job, int device) {
    const warpsmith::DeviceGuard guard(device);
    backward_cuda(job, device, current_stream(device));
  }

 private:
  static void* current_stream(int device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return stream;
  }
};
#endif

template <typename Device>
bool is_empty(const TensorInfo& x) {
  if (x.numel() != 0) return false;
  set_last_path(Device::kName, "none", "empty", 0);
  return true;
}

std::optional<TensorInfo> read(const std::optional<Tensor>& tensor) {
  std::optional<TensorInfo> info;
  if (tensor) info.emplace(*tensor, Access::kRead);
  return info;
}

// The arguments that all forward ops share, checked.
struct Arguments {
  std::optional<TensorInfo> weight, bias;
  Options options;

  Arguments(const TensorInfo& x, const std::optional<Tensor>& weight_tensor, double eps,
            int64_t rounding, double weight_offset, const std::optional<Tensor>& bias_tensor)
      : weight(read(weight_tensor)),
        bias(read(bias_tensor)),
        options{eps, static_cast<Rounding>(rounding), weight_offset} {
    check_options(eps, rounding, weight_offset);
    check_x(x);
    check_columns(x, weight, bias);
  }

  ScalarType y_dtype(const TensorInfo& x) const {
    return result_dtype(x, weight, options.rounding);
  }
};

void check_written(const TensorInfo& written, const char* name, const Arguments& arguments) {
  warpsmith::check_no_self_overlap(written, name);
  if (arguments.weight) {
    warpsmith::check_no_overlap(written, name, *arguments.weight, "weight");
  }
  if (arguments.bias) warpsmith::check_no_overlap(written, name, *arguments.bias, "bias");
}

template <typename Device, bool kWithRstd>
auto norm(const Tensor& x_tensor, const std::optional<Tensor>& weight, double eps, int64_t rounding,
          double weight_offset, const std::optional<Tensor>& bias) {
  const TensorInfo x(x_tensor, Access::kRead);
  const Arguments arguments(x, weight, eps, rounding, weight_offset, bias);
  Tensor y_tensor = empty_like(x, arguments.y_dtype(x));
  std::optional<Tensor> rstd_tensor;
  if (kWithRstd) rstd_tensor = empty_rstd(x);
  if (!is_empty<Device>(x)) {
    const TensorInfo y(y_tensor, Access::kWrite);
    std::optional<TensorInfo> rstd;
    if (kWithRstd) rstd.emplace(*rstd_tensor, Access::kWrite);
    Device::forward(make_forward_job(y, x, nullptr, nullptr, pointer_to(rstd), arguments.weight,
                                     arguments.bias, arguments.options),
                    x.device_index);
  }
  if constexpr (kWithRstd) {
    return std::make_tuple(y_tensor, *rstd_tensor);
  } else {
    return y_tensor;
  }
}

template <typename Device>
void rms_norm_out(const Tensor& x_tensor, const Tensor& out_tensor,
                  const std::optional<Tensor>& weight, double eps, int64_t rounding,
                  double weight_offset, const std::optional<Tensor>& bias) {
  const TensorInfo x(x_tensor, Access::kRead);
  const Arguments arguments(x, weight, eps, rounding, weight_offset, bias);
  const TensorInfo out(out_tensor, Access::kWrite);
  const ScalarType dtype = arguments.y_dtype(x);
  STD_TORCH_CHECK(out.dtype == dtype, "out: must have dtype ", warpsmith::dtype_name(dtype),
                  ", got ", warpsmith::dtype_name(out.dtype));
  check_same_sizes(out, "out", x);
  warpsmith::check_aligned(out, "out");
  check_written(out, "out", arguments);
  warpsmith::check_no_overlap(out, "out", x, "x");
  if (is_empty<Device>(x)) return;
  Device::forward(make_forward_job(out, x, nullptr, nullptr, nullptr, arguments.weight,
                                   arguments.bias, arguments.options),
                  x.device_index);
}

template <typename Device, bool kWithRstd>
auto add_norm(const Tensor& x_tensor, const Tensor& residual_tensor,
              const std::optional<Tensor>& weight, double eps, int64_t rounding,
              double weight_offset, const std::optional<Tensor>& bias) {
  const TensorInfo x(x_tensor, Access::kRead), residual(residual_tensor, Access::kRead);
  const Arguments arguments(x, weight, eps, rounding, weight_offset, bias);
  check_like_x(residual, "residual", x);
  Tensor y_tensor = empty_like(x, arguments.y_dtype(x)), sum_tensor = empty_like(x, x.dtype);
  std::optional<Tensor> rstd_tensor;
  if (kWithRstd) rstd_tensor = empty_rstd(x);
  if (!is_empty<Device>(x)) {
    const TensorInfo y(y_tensor, Access::kWrite), sum(sum_tensor, Access::kWrite);
    std::optional<TensorInfo> rstd;
    if (kWithRstd) rstd.emplace(*rstd_tensor, Access::kWrite);
    Device::forward(make_forward_job(y, x, &residual, &sum, pointer_to(rstd), arguments.weight,
                                     arguments.bias, arguments.options),
                    x.device_index);
  }
  if constexpr (kWithRstd) {
    return std::make_tuple(y_tensor, sum_tensor, *rstd_tensor);
  } else {
    return std::make_tuple(y_tensor, sum_tensor);
  }
}

template <typename Device>
void add_norm_in_place(const Tensor& x_tensor, const Tensor& residual_tensor,
                       const std::optional<Tensor>& weight, double eps, int64_t rounding,
                       double weight_offset, const std::optional<Tensor>& bias) {
  const TensorInfo x(x_tensor, Access::kWrite), residual(residual_tensor, Access::kWrite);
  const Arguments arguments(x, weight, eps, rounding, weight_offset, bias);
  check_like_x(residual, "residual", x);
  const ScalarType dtype = arguments.y_dtype(x);
  STD_TORCH_CHECK(dtype == x.dtype, "x: takes the result, so must have its dtype, ",
                  warpsmith::dtype_name(dtype), ", got ", warpsmith::dtype_name(x.dtype));
  check_written(x, "x", arguments);
  check_written(residual, "residual", arguments);
  warpsmith::check_no_overlap(x, "x", residual, "residual");
  if (is_empty<Device>(x)) return;
  Device::forward(make_forward_job(x, x, &residual, &residual, nullptr, arguments.weight,
                                   arguments.bias, arguments.options),
                  x.device_index);
}

// dresidual is the gradient of residual_out; dweight and dbias have no elements where they are not
// needed.
template <typename Device>
std::tuple<Tensor, Tensor, Tensor> rms_norm_backward(
    const Tensor& dy_tensor, const Tensor& x_tensor, const Tensor& rstd_tensor,
    const std::optional<Tensor>& weight_tensor, double weight_offset, bool needs_dweight,
    bool needs_dbias, const std::optional<Tensor>& dresidual_tensor) {
  const TensorInfo x(x_tensor, Access::kRead), dy(dy_tensor, Access::kRead);
  const TensorInfo rstd(rstd_tensor, Access::kRead);
  const std::optional<TensorInfo> weight = read(weight_tensor), dresidual = read(dresidual_tensor);
  check_options(0, 0, weight_offset);
  check_x(x);
  check_columns(x, weight, std::nullopt);
  check_floats(dy, "dy");
  check_same_sizes(dy, "dy", x);
  STD_TORCH_CHECK(rstd.dtype == ScalarType::Float, "rstd: must have dtype float32, got ",
                  warpsmith::dtype_name(rstd.dtype));
  warpsmith::check_shape(rstd, "rstd",
                         std::vector<int64_t>(x.sizes.begin(), x.sizes.begin() + x.dim() - 1));
  warpsmith::check_same_device(rstd, "rstd", x, "x");
  warpsmith::check_aligned(rstd, "rstd");
  if (dresidual) check_like_x(*dresidual, "dresidual", x);
  STD_TORCH_CHECK(weight || !(needs_dweight || needs_dbias),
                  "weight: is needed for its gradient and that of bias, got None");

  Tensor dx_tensor = empty_like(x, x.dtype);
  const ScalarType weight_dtype = weight ? weight->dtype : x.dtype;
  const auto empty_column = [&](bool needed) {
    return warpsmith::empty_strided({needed ? x.sizes[x.dim() - 1] : 0}, {1}, weight_dtype, x);
  };
  Tensor dweight_tensor = empty_column(needs_dweight), dbias_tensor = empty_column(needs_dbias);
  const auto results = [&] { return std::make_tuple(dx_tensor, dweight_tensor, dbias_tensor); };
  if (is_empty<Device>(x)) {
    if (needs_dweight) torch::stable::zero_(dweight_tensor);
    if (needs_dbias) torch::stable::zero_(dbias_tensor);
    return results();
  }
  const TensorInfo dx(dx_tensor, Access::kWrite);
  BackwardJob job =
      make_backward_job(dx, dy, x, pointer_to(dresidual), rstd, weight, weight_offset);
  if (needs_dweight) job.dweight = dweight_tensor.mutable_data_ptr();
  if (needs_dbias) job.dbias = dbias_tensor.mutable_data_ptr();
  job.num_partials = Device::count_partials(job, x.device_index);
  const Tensor partials = warpsmith::empty_strided(
      {job.num_partials * (needs_dweight + needs_dbias) * job.hidden}, {1}, ScalarType::Float, x);
  job.partials = static_cast<float*>(partials.mutable_data_ptr());
  Device::backward(job, x.device_index);
  return results();
}

}  // namespace

void set_last_path(const char* device, const char* arch, const char* strategy, int access_bytes) {
  last = {device, arch, strategy, access_bytes};
}

}  // namespace rmsnorm

// The ops that end in _train return rstd as well and are differentiable; the others are for callers
// that need no gradient. To parse an argument takes 0.2 us, to leave it to its default next to
// nothing: what is given most often comes first.
#define RMSNORM_OPTIONS \
  "Tensor? weight=None, float eps=1e-6, int rounding=0, float weight_offset=0., Tensor? bias=None"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, " RMSNORM_OPTIONS ") -> Tensor");
  ops.def("rms_norm_train(Tensor x, " RMSNORM_OPTIONS ") -> (Tensor, Tensor)");
  ops.def("rms_norm_out(Tensor x, Tensor(a!) out, " RMSNORM_OPTIONS ") -> ()");
  ops.def("fused_add_rms_norm(Tensor x, Tensor residual, " RMSNORM_OPTIONS ") -> (Tensor, Tensor)");
  ops.def("fused_add_rms_norm_train(Tensor x, Tensor residual, " RMSNORM_OPTIONS
          ") -> (Tensor, Tensor, Tensor)");
  ops.def("fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, " RMSNORM_OPTIONS ") -> ()");
  ops.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight=None, "
      "float weight_offset=0., bool needs_dweight=False, bool needs_dbias=False, "
      "Tensor? dresidual=None) -> (Tensor, Tensor, Tensor)");
  ops.def("last_path() -> str");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("last_path", TORCH_BOX(&rmsnorm::last_path));
}

#define RMSNORM_IMPLEMENTATIONS(Device)                                                         \
  ops.impl("rms_norm", TORCH_BOX((&rmsnorm::norm<rmsnorm::Device, false>)));                    \
  ops.impl("rms_norm_train", TORCH_BOX((&rmsnorm::norm<rmsnorm::Device, true>)));               \
  ops.impl("rms_norm_out", TORCH_BOX(&rmsnorm::rms_norm_out<rmsnorm::Device>));                 \
  ops.impl("fused_add_rms_norm", TORCH_BOX((&rmsnorm::add_norm<rmsnorm::Device, false>)));      \
  ops.impl("fused_add_rms_norm_train", TORCH_BOX((&rmsnorm::add_norm<rmsnorm::Device, true>))); \
  ops.impl("fused_add_rms_norm_", TORCH_BOX(&rmsnorm::add_norm_in_place<rmsnorm::Device>));     \
  ops.impl("rms_norm_backward", TORCH_BOX(&rmsnorm::rms_norm_backward<rmsnorm::Device>))

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { RMSNORM_IMPLEMENTATIONS(Cpu); }

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { RMSNORM_IMPLEMENTATIONS(Cuda); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
