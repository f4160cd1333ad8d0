// CPU entry points: choice of the instruction set, threads, chunks of partial sums.
#include <algorithm>
#include <cstring>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "rmsnorm_cpu/rmsnorm_ranges.h"
#include "torch-ext/torch_binding.h"
#include "warpsmith/cpu/isa.h"

namespace rmsnorm {
namespace {

// Elements that are worth a thread of their own: about 10 us of work with AVX2.
constexpr int64_t kElementsPerThread = int64_t{1} << 15;
// From this many rows on, weights are widened once for all of them.
constexpr int64_t kRowsToWiden = 4;
// Chunks of rows with partial sums of their own: enough for the threads, long enough that zeroing
// and adding them costs little, short enough for fp32 sums.
constexpr int64_t kMaxChunks = 32, kMinChunkRows = 16, kMaxChunkRows = 1024;

const Body& body_of(warpsmith::Isa isa) {
#if WARPSMITH_HAS_X86_ISAS
  if (isa == warpsmith::Isa::kAvx2) return kAvx2Body;
  if (isa == warpsmith::Isa::kAvx512) return kAvx512Body;
#endif
  return kBaselineBody;
}

int64_t grain(int64_t elements_per_item) {
  return std::max<int64_t>(1, kElementsPerThread / elements_per_item);
}

// Weights that are fp32 in a buffer of their own where that pays.
class WidenedColumns {
 public:
  WidenedColumns(const Body& body, const Columns& columns, int64_t hidden, int64_t num_rows)
      : columns_(columns) {
    const bool plain = columns.dtype == warpsmith::dtype_of<float> && columns.stride == 1 &&
                       columns.offset == 0.0f;
    if (columns.data == nullptr || plain || num_rows < kRowsToWiden) return;
    buffer_.resize(hidden + 2 * kLanes);
    constexpr uintptr_t kAlignment = 64;
    const auto start = reinterpret_cast<uintptr_t>(buffer_.data());
    float* aligned =
        buffer_.data() + (kAlignment - start % kAlignment) % kAlignment / sizeof(float);
    body.widen(columns, hidden, aligned);
    columns_ = {aligned, warpsmith::dtype_of<float>, 1, 0.0f};
  }
  const Columns& get() const { return columns_; }

 private:
  Columns columns_;
  std::vector<float> buffer_;
};

template <typename Strides>
const char* strategy(const Strides& column_strides) {
  for (const int64_t stride : column_strides) {
    if (stride != 1) return "strided";
  }
  return "contiguous";
}

}  // namespace

void forward_cpu(const ForwardJob& job) {
  const warpsmith::Isa isa = warpsmith::cpu_isa();
  const Body& body = body_of(isa);
  const int64_t num_rows = job.rows.count;
  const WidenedColumns weight(body,
                              {job.weight, job.weight_dtype, job.weight_stride, job.weight_offset},
                              job.hidden, num_rows);
  const WidenedColumns bias(body, {job.bias, job.weight_dtype, job.bias_stride, 0.0f}, job.hidden,
                            num_rows);
  torch::stable::parallel_for(0, num_rows, grain(job.hidden), [&](int64_t begin, int64_t end) {
    body.forward(job, weight.get(), bias.get(), begin, end);
  });
  set_last_path("cpu", warpsmith::kIsaNames[static_cast<int>(isa)], strategy(job.column_strides),
                0);
}

int64_t count_partials_cpu(const BackwardJob& job) {
  if (job.dweight == nullptr && job.dbias == nullptr) return 0;
  const int64_t num_rows = job.rows.count;
  const int64_t few = std::clamp<int64_t>(num_rows / kMinChunkRows, 1, kMaxChunks);
  return std::max(few, (num_rows + kMaxChunkRows - 1) / kMaxChunkRows);
}

void backward_cpu(const BackwardJob& job) {
  const warpsmith::Isa isa = warpsmith::cpu_isa();
  const Body& body = body_of(isa);
  const int64_t num_rows = job.rows.count, num_chunks = job.num_partials;
  const WidenedColumns weight(body,
                              {job.weight, job.weight_dtype, job.weight_stride, job.weight_offset},
                              job.hidden, num_rows);
  if (num_chunks == 0) {
    torch::stable::parallel_for(0, num_rows, grain(job.hidden), [&](int64_t begin, int64_t end) {
      body.backward(job, weight.get(), begin, end, nullptr);
    });
  } else {
    const int64_t partial_size = ((job.dweight != nullptr) + (job.dbias != nullptr)) * job.hidden;
    const int64_t chunk_rows = (num_rows + num_chunks - 1) / num_chunks;
    torch::stable::parallel_for(0, num_chunks, grain(chunk_rows * job.hidden),
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t chunk = begin; chunk < end; ++chunk) {
                                    float* partial = job.partials + chunk * partial_size;
                                    std::memset(partial, 0, partial_size * sizeof(float));
                                    body.backward(job, weight.get(), chunk * num_rows / num_chunks,
                                                  (chunk + 1) * num_rows / num_chunks, partial);
                                  }
                                });
    const int64_t num_groups = (job.hidden + kLanes - 1) / kLanes;
    torch::stable::parallel_for(
        0, num_groups, grain(num_chunks * kLanes), [&](int64_t begin, int64_t end) {
          body.reduce(job, begin * kLanes, std::min(end * kLanes, job.hidden));
        });
  }
  set_last_path("cpu", warpsmith::kIsaNames[static_cast<int>(isa)], strategy(job.column_strides),
                0);
}

}  // namespace rmsnorm
