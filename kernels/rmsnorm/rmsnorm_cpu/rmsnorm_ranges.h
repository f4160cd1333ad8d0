// What an instruction set's body offers: parts of a job, for one thread each. None throws.
#pragma once

#include "rmsnorm_common/job.h"

namespace rmsnorm {

// `hidden` weights or biases in fp32 with their offset added; a null `data` stands for ones.
struct Columns {
  const void* data;
  ScalarType dtype;
  int64_t stride;
  float offset;
};

struct Body {
  // `to` has room for whole groups of kLanes.
  void (*widen)(const Columns& columns, int64_t hidden, float* to);
  // Rows [begin, end); bias.data is null where the job has none.
  void (*forward)(const ForwardJob& job, const Columns& weight, const Columns& bias, int64_t begin,
                  int64_t end);
  // Rows [begin, end), added to `partial`: the sums of one chunk, or null.
  void (*backward)(const BackwardJob& job, const Columns& weight, int64_t begin, int64_t end,
                   float* partial);
  // Columns [begin, end) of dweight and dbias from all partial sums.
  void (*reduce)(const BackwardJob& job, int64_t begin, int64_t end);
};

// Running sums of a row: element i goes to sum i % kLanes, on every instruction set.
inline constexpr int kLanes = 64;

extern const Body kBaselineBody, kAvx2Body, kAvx512Body;  // all from rmsnorm_body.h

}  // namespace rmsnorm
