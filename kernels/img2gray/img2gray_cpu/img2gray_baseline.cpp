#include "img2gray_cpu/img2gray_job.h"

#define IMG2GRAY_ISA 0
#define IMG2GRAY_RANGE gray_range_baseline
#include "img2gray_cpu/img2gray_body.h"
