#include "expect.h"
#include "warpsmith/device_info.h"

using namespace warpsmith;

int main() {
  EXPECT(newest_path_within(70) == 0);
  EXPECT(newest_path_within(75) == 75);
  EXPECT(newest_path_within(80) == 80 && newest_path_within(86) == 80 &&
         newest_path_within(89) == 80);
  EXPECT(newest_path_within(90) == 90 && newest_path_within(120) == 90);

  const int h200 = 227 * 1024;
  EXPECT(shared_memory_limit(75, h200) == 64 * 1024);
  EXPECT(shared_memory_limit(80, h200) == 163 * 1024);
  EXPECT(shared_memory_limit(90, h200) == h200);
  EXPECT(shared_memory_limit(80, 99 * 1024) == 99 * 1024);  // 8.6
  return failures;
}
