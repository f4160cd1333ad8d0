#include <cstring>
#include <type_traits>

#include "rmsnorm_cpu/rmsnorm_ranges.h"

#define RMSNORM_ISA 0
#define RMSNORM_BODY kBaselineBody
#include "rmsnorm_cpu/rmsnorm_body.h"
