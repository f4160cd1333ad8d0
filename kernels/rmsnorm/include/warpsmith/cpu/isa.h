// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// Which compiled body a CPU op runs, chosen once per call by cpu_isa().
// WARPSMITH_CPU_ISA=baseline|avx2|avx512 forces one that the machine has. A body is compiled for
// its instruction set by the pragmas below, which a source file opens after all its includes, so
// that nothing inline from a header is compiled for a wider set than the machine may have.
#pragma once

#include <cstdlib>
#include <cstring>

#include <torch/headeronly/util/Exception.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WARPSMITH_HAS_X86_ISAS 1
#define WARPSMITH_BEGIN_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c\")")
#define WARPSMITH_BEGIN_AVX512         \
  _Pragma("GCC push_options") _Pragma( \
      "GCC target(\"avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512\")")
#define WARPSMITH_END_ISA _Pragma("GCC pop_options")
#else
#define WARPSMITH_HAS_X86_ISAS 0
#endif

namespace warpsmith {

enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

inline constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512"};

inline Isa widest_isa() {
#if WARPSMITH_HAS_X86_ISAS
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))) {
    return Isa::kBaseline;
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi")) {
    return Isa::kAvx512;
  }
  return Isa::kAvx2;
#else
  return Isa::kBaseline;
#endif
}

inline Isa cpu_isa() {
  static const Isa widest = widest_isa();
  const char* forced = std::getenv("WARPSMITH_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return widest;
  for (int isa = 0; isa < 3; ++isa) {
    if (std::strcmp(forced, kIsaNames[isa]) == 0) {
      STD_TORCH_CHECK(isa <= static_cast<int>(widest), "WARPSMITH_CPU_ISA: this machine has up to ",
                      kIsaNames[static_cast<int>(widest)], ", got ", forced);
      return static_cast<Isa>(isa);
    }
  }
  STD_TORCH_CHECK(false, "WARPSMITH_CPU_ISA: must be baseline, avx2 or avx512, got ", forced);
}

}  // namespace warpsmith
