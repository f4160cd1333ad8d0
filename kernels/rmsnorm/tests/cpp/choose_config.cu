#include "expect.h"
#include "rmsnorm_cuda/rmsnorm_bwd.cuh"

using namespace rmsnorm;

namespace {

constexpr int kH200 = 132;

ForwardConfig forward(int64_t rows, int64_t hidden, int element_bytes = 2, bool add = false) {
  return choose_forward({rows, hidden, element_bytes, add, true, kSlotBytes / element_bytes});
}

ForwardConfig looped(int64_t rows, int64_t hidden, int access_elements) {
  return choose_forward({rows, hidden, 2, false, false, access_elements});
}

BackwardConfig backward(int64_t rows, int64_t hidden, int element_bytes = 2) {
  return choose_backward({rows, hidden, element_bytes, false, true, kSlotBytes / element_bytes},
                         kH200);
}

// Every slot of a row has a thread, only last slots of threads lie outside, and the block may run.
bool covers(const ForwardConfig& config, int64_t hidden, int element_bytes, bool add) {
  const int64_t slots = hidden * element_bytes / kSlotBytes;
  const bool warp = config.strategy == Strategy::kWarp;
  const int64_t row_threads = warp ? 1 << config.group.log2_lanes : config.threads;
  return config.slots * row_threads >= slots && (config.slots - 1) * row_threads <= slots &&
         (warp ? config.rows_per_block * row_threads == config.threads
               : config.threads % kWarpSize == 0 &&
                     config.threads <= max_block_threads(config.slots, add));
}

}  // namespace

int main() {
  // Heads: 8 lanes of a row, 16 rows for a block.
  const ForwardConfig heads = forward(655360, 128);
  EXPECT(heads.strategy == Strategy::kWarp && heads.group.log2_lanes == 3);
  EXPECT(heads.threads == 128 && heads.rows_per_block == 16 && heads.slots == 2);
  EXPECT(forward(10, 8).group.log2_lanes == 0);
  EXPECT(forward(10, 512).strategy == Strategy::kWarp);
  EXPECT(forward(10, 520).strategy == Strategy::kBlock && forward(10, 520).threads == 64);

  // Two vectors for a thread, four in long rows.
  EXPECT(forward(16384, 4096).slots == 2 && forward(16384, 4096).threads == 256);
  EXPECT(forward(16384, 5120).slots == 4 && forward(16384, 5120).threads == 160);
  EXPECT(forward(16384, 8192).slots == 4 && forward(16384, 8192).threads == 256);
  EXPECT(forward(16384, 4096, 4).slots == 4);
  EXPECT(forward(16384, 8192, 2, true).slots == 2);

  // The longest rows that registers hold.
  EXPECT(forward(2, 32768).strategy == Strategy::kBlock && forward(2, 32768).threads == 1024);
  EXPECT(forward(2, 32776).strategy == Strategy::kLooped);
  EXPECT(forward(2, 16384, 2, true).strategy == Strategy::kBlock);
  EXPECT(forward(2, 16392, 2, true).strategy == Strategy::kLooped);

  for (int element_bytes : {2, 4}) {
    for (bool add : {false, true}) {
      for (int64_t rows : {1, 100000}) {
        for (int64_t hidden = 8; hidden <= 40000; hidden += 8) {
          const ForwardConfig config = forward(rows, hidden, element_bytes, add);
          EXPECT(config.strategy == Strategy::kLooped ||
                 covers(config, hidden, element_bytes, add));
        }
      }
    }
  }

  // Any row: lanes for short ones, blocks for others, whatever an access holds.
  EXPECT(!looped(10, 128, 1).group.block_per_row && looped(10, 128, 1).group.log2_lanes == 5);
  EXPECT(looped(10, 3, 1).group.log2_lanes == 2 && looped(10, 3, 1).rows_per_block == 32);
  EXPECT(looped(10, 129, 1).group.block_per_row && looped(10, 129, 1).threads == 64);
  EXPECT(looped(10, 1 << 18, 8).threads == 512);

  // Backward: as many blocks as fit at once, or as there are rows.
  const BackwardConfig llama = backward(16384, 4096);
  EXPECT(llama.strategy == Strategy::kBlock && llama.slots == 2 && llama.threads == 256);
  EXPECT(llama.partials == 2 * kH200);
  EXPECT(backward(100, 4096).partials == 100);
  EXPECT(backward(16384, 2048).partials == 4 * kH200);
  EXPECT(backward(16384, 8192).slots == 2 && backward(16384, 8192).partials == kH200);
  EXPECT(backward(655360, 128).strategy == Strategy::kWarp);
  EXPECT(backward(655360, 128).partials == 2 * kH200);
  EXPECT(backward(33, 128).partials == 2);
  EXPECT(backward(10, 16384).slots == 4 && backward(10, 16392).strategy == Strategy::kLooped);
  EXPECT(backward(int64_t{1} << 31, 128).strategy == Strategy::kLooped);
  for (int64_t hidden = 8; hidden <= 16384; hidden += 8) {
    const BackwardConfig config = backward(1000, hidden);
    const int64_t lanes =
        config.strategy == Strategy::kWarp ? 1 << config.group.log2_lanes : config.threads;
    EXPECT(config.slots * lanes >= hidden / 8 && (config.slots - 1) * lanes <= hidden / 8);
    EXPECT(config.threads <= 512);
  }
  return failures;
}
