"""Loads the kernel as users do; tests run on every device there is."""

import os
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

KERNEL_DIR = Path(__file__).resolve().parents[1]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# RMSNORM_TEST_BUILD names another build to test: a directory that holds variants.
BUILD_DIR = Path(os.environ.get("RMSNORM_TEST_BUILD", KERNEL_DIR))


def pytest_collection_modifyitems(items):
    """Of tests that run on every device, those on the GPU are GPU tests."""
    for item in items:
        if hasattr(item, "callspec") and "cuda" in item.callspec.params.values():
            item.add_marker("gpu")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors here are small: threads would cost more than they save, most of all on a busy machine.

    Tests of threads set their number themselves.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel():
    return get_local_kernel(BUILD_DIR)


@pytest.fixture(scope="session")
def build_dir():
    return BUILD_DIR


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="session")
def rms_norm(kernel):
    return kernel.rms_norm
