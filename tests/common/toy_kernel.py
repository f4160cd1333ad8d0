"""A small kernel written into a scratch tree: one op, CPU and CUDA, the latter in two sections."""

import subprocess
from pathlib import Path

BUILD_TOML = """\
[general]
name = "{name}"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "warpsmith/{name}"

[torch]
src = ["torch-ext/torch_binding.cpp"]

[torch.stable-abi]
cpu = "2.11"
cuda = "2.11"

[kernel.cpu]
backend = "cpu"
depends = ["torch"]
include = ["include"]
cxx-flags = ["-ffp-contract=off"]
src = ["cpu/add.cpp", "include/step.h"]

[kernel.cuda]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = ["7.5", "8.0", "9.0+PTX"]
include = ["include"]
cxx-flags = ["-ffp-contract=off"]
cuda-flags = ["--fmad=false", "-lineinfo"]
src = ["cpu/add.cpp", "cuda/add.cu", "include/step.h"]

[kernel.hopper]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = ["9.0a"]
cuda-flags = ["--fmad=false"]
src = ["cuda/hopper.cu"]
"""

FILES = {
    "torch-ext/torch_binding.cpp": """\
#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("add_step(Tensor(a!) x) -> ()"); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
""",
    "torch-ext/{package}/__init__.py": """\
from .wrapper import add_step

__all__ = ["add_step"]
""",
    "torch-ext/{package}/wrapper.py": """\
from ._ops import add_op_namespace_prefix, ops

NAME = add_op_namespace_prefix("add_step")


def add_step(x):
    y = x.clone()
    ops.add_step(y)
    return y
""",
    "include/step.h": "#pragma once\nconstexpr float kStep = 2.0f;\n",
    "cpu/add.cpp": """\
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "registration.h"
#include "step.h"

#ifdef USE_CUDA
void launch_add_step(float* x, int64_t n, int32_t device);
#endif

namespace {

using torch::stable::Tensor;

void add_step_cpu(Tensor x) {
  STD_TORCH_CHECK(x.dim() == 1, "x: expected 1 dimension, got ", x.dim());
  float* data = static_cast<float*>(x.mutable_data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) data[i] += kStep;
}

#ifdef USE_CUDA
void add_step_cuda(Tensor x) {
  launch_add_step(static_cast<float*>(x.mutable_data_ptr()), x.numel(), x.get_device_index());
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("add_step", TORCH_BOX(&add_step_cpu));
}

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("add_step", TORCH_BOX(&add_step_cuda));
}
#endif
""",
    "cuda/add.cu": """\
#include <cstdint>

#include "step.h"

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

__global__ void add_step_kernel(float* x, int64_t n) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] += kStep;
}

void launch_add_step(float* x, int64_t n, int32_t device) {
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(device, &stream);
  add_step_kernel<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, n);
}
""",
    "cuda/hopper.cu": """\
__global__ void hopper_kernel(float* x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;");
#endif
  *x = 1.0f;
}
""",
    "CARD.md": "# toy\n",
    "CHANGELOG.md": "# Changelog\n",
    "example.py": "",
    "benchmarks/benchmark.py": "",
    "flake.nix": "{ }\n",
    "flake.lock": "{ }\n",
}

# Copied by value over an array that does not fit into the registers it is given.
SPILLING_CU = """\
__global__ void spilling_kernel(const float* x, float* y) {
  float v[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) v[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; ++i) y[i * 32 + threadIdx.x] = v[i] * v[47 - i];
}
"""


def write_toy(root: Path, name: str = "toy") -> Path:
    """Write the kernel as kernels/<name> of the tree and return its directory."""
    directory = root / "kernels" / name
    for path, text in FILES.items():
        file = directory / path.format(package=name.replace("-", "_"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (directory / "build.toml").write_text(BUILD_TOML.format(name=name))
    return directory


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new))


def commit_all(root: Path) -> None:
    def git(*args):
        subprocess.run(["git", "-C", root, *args], check=True, capture_output=True)

    if not (root / ".git").exists():
        git("init", "-q")
    git("add", "-A", "-f")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    git(*identity, "commit", "-q", "--no-verify", "-m", "test")
