"""Loads the kernel as users do; tests run on every device there is."""

import os
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

KERNEL_DIR = Path(__file__).resolve().parents[1]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# IMG2GRAY_TEST_BUILD names another build to test: a directory that holds variants.
BUILD_DIR = Path(os.environ.get("IMG2GRAY_TEST_BUILD", KERNEL_DIR))


def pytest_collection_modifyitems(items):
    """Of tests that run on every device, those on the GPU are GPU tests."""
    for item in items:
        if hasattr(item, "callspec") and "cuda" in item.callspec.params.values():
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def kernel():
    return get_local_kernel(BUILD_DIR)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def img2gray(kernel):
    return kernel.img2gray


@pytest.fixture(scope="session")
def reference(kernel):
    return kernel.img2gray_reference


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20)


@pytest.fixture(scope="session")
def strided_copy():
    """Copies a tensor to a device, strides included."""

    def copy(tensor, device):
        if tensor.numel() == 0:
            return tensor.to(device)
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        return tensor.as_strided((span,), (1,)).to(device).as_strided(tensor.shape, tensor.stride())

    return copy
