// Kernels hold copies of this header: edit the one in shared/include and run `make sync-shared`.
//
// The one place that decides which architecture path (75, 80 or 90) a launch takes, and how much
// shared memory that path may use. WARPSMITH_ARCH=75|80|90 forces a path that both the device and
// this binary have.
//
// GPUs newer than 9.0 take path 90: it stands for what every GPU from 9.0 on has. Code for 9.0a
// alone needs a check of its own.
//
// Included by .cu files. Everything is local to the including file, as the probe must be: it tells
// the architectures that this file, with its own list of capabilities, was compiled for.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>

#include <cuda_runtime.h>

#include "warpsmith/check.h"

namespace warpsmith {
namespace {

constexpr int kArchPaths[] = {75, 80, 90};
constexpr int kMaxDevices = 64;

// Asked for its attributes: tells which architecture this binary was compiled for, whoever
// assembled it last.
__global__ void arch_probe_kernel() {}

int newest_path_within(int compute_capability) {
  int path = 0;
  for (int arch : kArchPaths) {
    if (arch <= compute_capability) path = arch;
  }
  return path;
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

struct DeviceInfo {
  std::atomic<int> arch{0};  // the newest path that the device and the code compiled for it have
  std::atomic<int> shared_memory{0};  // bytes a block may opt in to
  std::atomic<int> multiprocessors{0};
};

// Asked once per device, which must be the current one. Threads that ask at once find the same.
const DeviceInfo& device_info(int device) {
  static DeviceInfo cache[kMaxDevices];
  STD_TORCH_CHECK(device >= 0 && device < kMaxDevices, "device: index must be below ", kMaxDevices,
                  ", got ", device);
  DeviceInfo& info = cache[device];
  if (info.arch.load(std::memory_order_acquire) == 0) {
    const int capability = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
                           device_attribute(cudaDevAttrComputeCapabilityMinor, device);
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, arch_probe_kernel));
    const int compiled = attributes.ptxVersion;
    const int arch = newest_path_within(capability < compiled ? capability : compiled);
    STD_TORCH_CHECK(arch != 0, "device: compute capability 7.5 or newer is needed, got ",
                    capability / 10, ".", capability % 10);
    info.shared_memory = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    info.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, device);
    info.arch.store(arch, std::memory_order_release);
  }
  return info;
}

// `device` must be the current device (a guard is in place).
int arch_path(int device) {
  const int available = device_info(device).arch;
  const char* forced = std::getenv("WARPSMITH_ARCH");
  if (forced == nullptr || *forced == '\0') return available;
  for (int arch : kArchPaths) {
    const char digits[] = {static_cast<char>('0' + arch / 10), static_cast<char>('0' + arch % 10),
                           '\0'};
    if (std::strcmp(forced, digits) == 0) {
      STD_TORCH_CHECK(arch <= available, "WARPSMITH_ARCH: device ", device,
                      " and this build have paths up to ", available, ", got ", forced);
      return arch;
    }
  }
  STD_TORCH_CHECK(false, "WARPSMITH_ARCH: must be 75, 80 or 90, got ", forced);
}

// Bytes one block may use on the path, never more than the device has: a forced path keeps the
// limits of its GPU.
int shared_memory_limit(int arch, int device_limit) {
  const int path_limit = 1024 * (arch == 75 ? 64 : arch == 80 ? 163 : 227);
  return path_limit < device_limit ? path_limit : device_limit;
}

}  // namespace
}  // namespace warpsmith
