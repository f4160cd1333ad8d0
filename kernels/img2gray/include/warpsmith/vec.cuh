// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Aligned vectors of 1 to 16 bytes, and the one rule that picks their width.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace warpsmith {

template <int kBytes>
struct VecWord;
template <>
struct VecWord<1> {
  using type = uint8_t;
};
template <>
struct VecWord<2> {
  using type = uint16_t;
};
template <>
struct VecWord<4> {
  using type = uint32_t;
};
template <>
struct VecWord<8> {
  using type = uint2;
};
template <>
struct VecWord<16> {
  using type = uint4;
};

// A union, so that the compiler moves whole words and takes elements apart only where they are
// used.
template <typename T, int kBytes>
union alignas(kBytes) Vec {
  static constexpr int kSize = kBytes / sizeof(T);
  using Word = typename VecWord<kBytes>::type;
  Word word;
  T elements[kSize];

  __device__ __forceinline__ Vec() {}

  static __device__ __forceinline__ Vec load(const T* from) {
    Vec vec;
    vec.word = *reinterpret_cast<const Word*>(from);
    return vec;
  }

  // In one access for sure, and in 32-bit words: where elements are used one by one, the compiler
  // also loads them so, or in words of 64 bits that take longer to take apart.
  static __device__ __forceinline__ Vec load_from_global(const T* from) {
    static_assert(kBytes == 16, "vectors of 16 bytes");
    Vec vec;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vec.word.x), "=r"(vec.word.y), "=r"(vec.word.z), "=r"(vec.word.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return vec;
  }

  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<Word*>(to) = word; }

  // In one access for sure: elements that were computed one by one, the compiler stores one by one.
  __device__ __forceinline__ void store_to_global(T* to) const {
    const size_t address = __cvta_generic_to_global(to);
    if constexpr (kBytes == 16) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word.x),
                   "r"(word.y), "r"(word.z), "r"(word.w)
                   : "memory");
    } else if constexpr (kBytes == 8) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(word.x), "r"(word.y)
                   : "memory");
    } else if constexpr (kBytes == 4) {
      asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
    } else if constexpr (kBytes == 2) {
      asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(word) : "memory");
    } else {
      store(to);
    }
  }
};

// From the bitwise or of the addresses and byte strides of all operands of an access: the widest
// power of two, up to 16, that divides each of them.
inline int widest_vector_bytes(uint64_t combined) {
  const uint64_t bits = combined | 16;
  return static_cast<int>(bits & (~bits + 1));
}

}  // namespace warpsmith
