// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Run-time dtype to compile-time C++ type. The same storage types serve host and device code.
#pragma once

#include <cstdint>

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

namespace warpsmith {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

template <typename T>
struct TypeTag {
  using type = T;
};

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<uint8_t> {
  static constexpr ScalarType value = ScalarType::Byte;
};
template <>
struct DtypeOf<uint16_t> {
  static constexpr ScalarType value = ScalarType::UInt16;
};
template <>
struct DtypeOf<Half> {
  static constexpr ScalarType value = ScalarType::Half;
};
template <>
struct DtypeOf<BFloat16> {
  static constexpr ScalarType value = ScalarType::BFloat16;
};
template <>
struct DtypeOf<float> {
  static constexpr ScalarType value = ScalarType::Float;
};
template <>
struct DtypeOf<double> {
  static constexpr ScalarType value = ScalarType::Double;
};

// dispatch_dtype<A, B, ...>(dtype, name, f) calls f(TypeTag<T>{}) with the T of the list whose
// dtype matches.
template <typename... Types, typename F>
void dispatch_dtype(ScalarType dtype, const char* argument, F&& f) {
  const bool found =
      ((dtype == DtypeOf<Types>::value ? (f(TypeTag<Types>{}), true) : false) || ...);
  STD_TORCH_CHECK(found, argument, ": dtype ", torch::headeronly::toString(dtype),
                  " is not supported");
}

}  // namespace warpsmith
