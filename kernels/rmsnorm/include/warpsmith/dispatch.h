// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Run-time dtype to compile-time C++ type. The same storage types serve host and device code.
//
// Without torch's ScalarType.h, which makes a CUDA file parse thrust: 4 s, as long as the kernels
// in it take. tensor_info.h compares the numbers here with torch's.
#pragma once

#include <cstdint>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

namespace c10 {
enum class ScalarType : int8_t;
}

namespace warpsmith {

using c10::ScalarType;
using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename T>
struct TypeTag {
  using type = T;
};

template <typename T>
inline constexpr ScalarType dtype_of = T::has_no_dtype;  // does not compile
template <>
inline constexpr ScalarType dtype_of<uint8_t>{0};
template <>
inline constexpr ScalarType dtype_of<Half>{5};
template <>
inline constexpr ScalarType dtype_of<float>{6};
template <>
inline constexpr ScalarType dtype_of<double>{7};
template <>
inline constexpr ScalarType dtype_of<BFloat16>{15};
template <>
inline constexpr ScalarType dtype_of<uint16_t>{27};

// dispatch_dtype<A, B, ...>(dtype, name, f) calls f(TypeTag<T>{}) with the T of the list whose
// dtype matches.
template <typename... Types, typename F>
void dispatch_dtype(ScalarType dtype, const char* argument, F&& f) {
  const bool found = ((dtype == dtype_of<Types> ? (f(TypeTag<Types>{}), true) : false) || ...);
  STD_TORCH_CHECK(found, argument, ": torch's dtype number ", static_cast<int>(dtype),
                  " is not supported");
}

}  // namespace warpsmith
