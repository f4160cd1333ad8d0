#pragma once

#include "rmsnorm_common/job.h"

namespace rmsnorm {

// Checked jobs with at least one element. Backward jobs come with as many partial sums as
// count_partials_* asked for. The device is the current one; the stream is a cudaStream_t.
void forward_cpu(const ForwardJob& job);
void forward_cuda(const ForwardJob& job, int device, void* stream);
int64_t count_partials_cpu(const BackwardJob& job);
int64_t count_partials_cuda(const BackwardJob& job, int device);
void backward_cpu(const BackwardJob& job);
void backward_cuda(const BackwardJob& job, int device, void* stream);

// What the last call of this thread ran, for tests of forced paths: string literals and the bytes
// per memory access.
void set_last_path(const char* device, const char* arch, const char* strategy, int access_bytes);

}  // namespace rmsnorm
