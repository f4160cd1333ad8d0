#include <cstring>
#include <type_traits>

#include "rmsnorm_cpu/rmsnorm_ranges.h"
#include "warpsmith/cpu/isa.h"

#if WARPSMITH_HAS_X86_ISAS
#include <immintrin.h>

WARPSMITH_BEGIN_AVX512
#define RMSNORM_ISA 512
#define RMSNORM_BODY kAvx512Body
#include "rmsnorm_cpu/rmsnorm_body.h"
WARPSMITH_END_ISA
#endif
