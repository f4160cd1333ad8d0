"""What a result depends on besides the code: device, driver, versions, commit."""

from __future__ import annotations

import os
import platform
import re
from datetime import date
from pathlib import Path

import torch

from ci import repo
from warpsmith import doctor

LIBRARIES = (
    "torch",
    "triton",
    "torchvision",
    "opencv-python-headless",
    "kernels",
    "transformers",
    "diffusers",
    "liger-kernel",
    "quack-kernels",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "flashinfer-python",
)


def collect(device: str) -> dict:
    result = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "libraries": {
            name: version
            for name in LIBRARIES
            if (version := doctor.installed_version(name)) is not None
        },
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        result |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "driver": doctor.driver_version(),
            "cuda": torch.version.cuda,
            "limits": limits(str(properties.uuid)),
        }
    else:
        cpu = doctor.cpu_info()
        result |= {
            "device": cpu["model"],
            "isa": cpu["isa"],
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "l3": l3_size(),
        }
    return result


def commit() -> str:
    """Short hash of the checkout, with "-dirty" if what it measures was changed since."""
    found = repo.commit()
    if found is None:
        return "unknown"
    name, dirty = found
    return name[:7] + ("-dirty" if dirty else "")


def l3_size() -> str:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return "unknown"


def limits(uuid: str) -> dict[str, str]:
    """MHz and W that the GPU may reach; nvidia-smi lists GPUs that torch does not see."""
    fields = ("clocks.max.sm", "clocks.max.mem", "power.limit")
    rows = {row[0]: row[1:] for row in doctor.nvidia_smi(",".join(("uuid", *fields)))}
    return dict(zip(fields, rows.get(f"GPU-{uuid}", ())))


def folder_name(environment: dict) -> str:
    """<device>/<date>-<commit>"""
    device = re.sub(r"[^a-z0-9]+", "-", (environment["device"] or "unknown").lower()).strip("-")
    return f"{device}/{environment['date']}-{environment['commit']}"
