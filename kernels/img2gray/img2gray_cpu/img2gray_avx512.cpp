#include "img2gray_cpu/img2gray_job.h"
#include "warpsmith/cpu/isa.h"

#if WARPSMITH_HAS_X86_ISAS
#include <immintrin.h>

WARPSMITH_BEGIN_AVX512
#define IMG2GRAY_ISA 512
#define IMG2GRAY_RANGE gray_range_avx512
#include "img2gray_cpu/img2gray_body.h"
WARPSMITH_END_ISA
#endif
