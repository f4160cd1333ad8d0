"""`python -m warpsmith doctor`: what this installation has, what loads, and what is silently off.

`collect()` gathers a report of plain values (the JSON output); `tables()` arranges it for people.
Every probe survives a missing or broken library, since those are what the report is for.
A Hub kernel is looked up in the local cache; only `use_hub` goes to the network.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from . import loading, pins

LIBRARIES = ("torch", "kernels", "transformers", "diffusers", "huggingface_hub", "einops")

ENVIRONMENT = {
    "LOCAL_KERNELS": "kernel builds used in place of Hub repositories",
    "WARPSMITH_ARCH": "forces the CUDA path: 75, 80 or 90",
    "WARPSMITH_CPU_ISA": "forces the CPU path: baseline, avx2 or avx512",
    "DISABLE_KERNEL_MAPPING": "1: kernelize restores the original layers",
    "USE_HUB_KERNELS": "NO: transformers leaves its hooks out at import",
    "HF_HUB_OFFLINE": "1: the Hub is not asked, only its cache",
    "TRANSFORMERS_OFFLINE": "as HF_HUB_OFFLINE",
    "KERNELS_CACHE": "directory of downloaded kernels",
    "HF_HOME": "directory of the Hub cache, if KERNELS_CACHE is not set",
    "HF_HUB_CACHE": "the same, more specific",
    "DIFFUSERS_ATTN_BACKEND": "attention backend of diffusers",
    "DIFFUSERS_TRUST_REMOTE_KERNELS": "1: diffusers takes kernels of untrusted publishers",
    "CUDA_VISIBLE_DEVICES": "GPUs that torch may see",
}

# As shared/include/warpsmith/cpu/isa.h and device_info.h choose; tests compare the former.
ISA_FLAGS = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi"),
    "avx2": ("avx2", "fma", "f16c"),
}
ARCH_PATHS = (75, 80, 90)

# diffusers/models/attention_dispatch.py, _check_attention_backend_requirements
DIFFUSERS_KERNELS_MIN = "0.12"


def run(*, as_json: bool, use_hub: bool = False) -> int:
    report = collect(use_hub=use_hub)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0 if report["ok"] else 1


def collect(*, use_hub: bool = False) -> dict:
    report = {
        "system": system_info(),
        "torch": torch_info(),
        "driver": driver_version(),
        "gpus": gpu_info(),
        "cpu": cpu_info(),
        "libraries": library_versions(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "kernels": kernel_info(use_hub),
        "hooks": {"transformers": transformers_hooks(), "diffusers": diffusers_hooks()},
    }
    report["problems"] = find_problems(report)
    report["ok"] = not report["problems"]
    return report


# --- machine -------------------------------------------------------------------------------------


def system_info() -> dict:
    root = pins.checkout_root()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "os": platform.platform(),
        "machine": platform.machine(),
        "warpsmith": str(pins.PACKAGE_DIR),
        "checkout": None if root is None else str(root),
    }


def torch_info() -> dict:
    try:
        import torch
    except Exception as error:
        return {"version": None, "cuda": None, "error": describe(error)}
    return {"version": torch.__version__, "cuda": torch.version.cuda, "error": None}


def nvidia_smi(fields: str) -> list[list[str]]:
    """One list of values per GPU; empty without the tool or a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode != 0:
        return []
    return [re.split(r",\s*", line.strip()) for line in result.stdout.splitlines() if line.strip()]


def driver_version() -> str | None:
    rows = nvidia_smi("driver_version")
    if rows:
        return rows[0][0]
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", text)
    return match.group(1) if match else None


def gpu_info() -> list[dict]:
    """GPUs that torch can use; failing that, those that nvidia-smi lists, marked unusable."""
    try:
        import torch

        if torch.cuda.is_available():
            devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            return [
                gpu_entry(d.name, d.major, d.minor, d.total_memory / 2**30, True) for d in devices
            ]
    except Exception:
        pass  # torch_info reports a torch that does not import
    gpus = []
    for row in nvidia_smi("name,compute_cap,memory.total"):
        if len(row) == 3 and re.fullmatch(r"\d+\.\d+", row[1]) and row[2].isdigit():
            major, minor = map(int, row[1].split("."))
            gpus.append(gpu_entry(row[0], major, minor, int(row[2]) / 1024, False))
    return gpus


def gpu_entry(name: str, major: int, minor: int, memory_gib: float, usable: bool) -> dict:
    return {
        "name": name,
        "capability": f"{major}.{minor}",
        "memory_gib": round(memory_gib, 1),
        "usable_by_torch": usable,
        "arch_path": arch_path(10 * major + minor, os.environ.get("WARPSMITH_ARCH")),
    }


def arch_path(capability: int, forced: str | None) -> int | None:
    """The path a release build takes on this device; None where a kernel call would raise."""
    paths = [path for path in ARCH_PATHS if path <= capability]
    if not forced:
        return paths[-1] if paths else None
    return next((path for path in paths if str(path) == forced), None)


def cpu_info() -> dict:
    flags = cpu_flags()
    widest = widest_isa(flags)
    forced = os.environ.get("WARPSMITH_CPU_ISA")
    order = ("baseline", "avx2", "avx512")
    if not forced:
        isa = widest
    elif forced in order and order.index(forced) <= order.index(widest):
        isa = forced
    else:
        isa = None  # every CPU call would raise
    return {"model": flags.get("model name"), "widest_isa": widest, "isa": isa}


def cpu_flags() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def widest_isa(flags: dict[str, str]) -> str:
    have = set(flags.get("flags", "").split())
    if not have.issuperset(ISA_FLAGS["avx2"]):
        return "baseline"
    return "avx512" if have.issuperset(ISA_FLAGS["avx512"]) else "avx2"


# --- libraries -----------------------------------------------------------------------------------


def installed_version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned_versions() -> dict[str, str]:
    """The `==` pins of this project: pyproject.toml in a checkout, else the package's metadata."""
    root = pins.checkout_root()
    if root is not None and (root / "pyproject.toml").exists():
        project = pins.read_toml(root / "pyproject.toml").get("project", {})
        requirements = list(project.get("dependencies", []))
        for extra in project.get("optional-dependencies", {}).values():
            requirements += extra
    else:
        try:
            requirements = importlib.metadata.requires("warpsmith") or []
        except importlib.metadata.PackageNotFoundError:
            requirements = []
    pinned = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*==\s*([^\s;,]+)", requirement)
        if match:
            pinned[match.group(1).lower().replace("-", "_")] = match.group(2)
    return pinned


def library_versions() -> list[dict]:
    try:
        pinned = pinned_versions()
    except ValueError:
        pinned = {}
    rows = []
    for library in LIBRARIES:
        installed, pin = installed_version(library), pinned.get(library)
        if installed is None:
            state = "not installed"
        elif pin is None:
            state = "no pin"
        else:
            # a pin of 2.13.0 accepts 2.13.0+cpu
            state = "ok" if pin in (installed, installed.partition("+")[0]) else "differs"
        rows.append({"name": library, "installed": installed, "pinned": pin, "state": state})
    return rows


# --- kernels -------------------------------------------------------------------------------------


def kernel_info(use_hub: bool) -> list[dict]:
    try:
        names = list(pins.known_kernels())
    except (OSError, ValueError) as error:
        return [failed_kernel("?", describe(error))]
    return [one_kernel(name, use_hub) for name in names]


def failed_kernel(name: str, error: str) -> dict:
    return {
        "name": name,
        "repo_id": None,
        "version": None,
        "source": None,
        "path": None,
        "variants": [],
        "state": "fails",
        "error": error,
        "build_archs": None,
    }


def one_kernel(name: str, use_hub: bool) -> dict:
    entry = failed_kernel(name, "")
    try:
        source = loading.find_source(name)
        entry.update(
            repo_id=source.pin.repo_id,
            version=source.pin.version,
            source=source.kind,
            path=None if source.path is None else str(source.path),
        )
        loading.import_kernels()
        if source.kind == loading.HUB:
            if use_hub:
                module = loading.load(name, trust_remote_code=[source.pin.repo_id])
                return {**entry, "state": "loads", "build_archs": build_archs(module)}
            source = replace(source, path=cached_snapshot(source.pin))
            if source.path is None:
                return {**entry, "state": "not cached"}
            entry["path"] = str(source.path)
        choices = loading.list_variants(source.path)
        entry["variants"] = [
            {"name": choice.name, "loaded": choice.chosen, "reason": choice.reason}
            for choice in choices
        ]
        if not any(choice.chosen for choice in choices):
            return {**entry, "error": loading.explain_no_variant(source, choices)}
        module = loading.load_from(source)
        return {**entry, "state": "loads", "build_archs": build_archs(module)}
    except Exception as error:  # whatever a library or a kernel's own code raises
        return {**entry, "error": describe(error)}


def cached_snapshot(pin: pins.Pin) -> Path | None:
    """The pinned version in the Hub cache, or None if it is not there under its branch name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = snapshot_download(
            pin.repo_id,
            repo_type="kernel",
            revision=f"v{pin.version}",
            cache_dir=os.environ.get("KERNELS_CACHE"),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(path)


def build_archs(module) -> list[str] | None:
    from kernels import get_loaded_kernels

    for loaded in get_loaded_kernels():
        if loaded.module is module:
            return loaded.metadata.backend.archs
    return None


# --- hooks ---------------------------------------------------------------------------------------


def transformers_hooks() -> dict:
    """Whether transformers' layers carry the decorators that kernels hook into."""
    version = installed_version("transformers")
    hooks = {"version": version, "state": "not installed", "window": None, "reason": None}
    if version is None:
        return hooks
    try:
        from transformers.utils import import_utils

        # outside this window the decorators do nothing, without a message
        low = getattr(import_utils, "KERNELS_MIN_VERSION", None)
        high = getattr(import_utils, "KERNELS_MAX_VERSION", None)
        available = import_utils.is_kernels_available()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
    except Exception as error:
        return {
            **hooks,
            "state": "off",
            "reason": f"its Llama code does not import: {describe(error)}",
        }
    if low and high:
        hooks["window"] = f">={low},<{high}"
    active = getattr(LlamaRMSNorm, "kernel_layer_name", None) == "RMSNorm"
    reason = why_off(version, hooks["window"], available, active)
    return {**hooks, "state": "off" if reason else "active", "reason": reason}


def why_off(version: str, window: str | None, available: bool, active: bool) -> str | None:
    kernels = installed_version("kernels")
    if kernels is None:
        return "kernels is not installed"
    if not available:
        return (
            f"transformers {version} accepts kernels {window or '(window unknown)'} and {kernels} is "
            "installed, so its decorators did nothing at import"
        )
    if not active:
        setting = os.environ.get("USE_HUB_KERNELS")
        if setting is not None and setting.upper() not in {"1", "ON", "YES", "TRUE"}:
            return f"USE_HUB_KERNELS={setting}: the decorators were left out at import"
        return "LlamaRMSNorm has no kernel_layer_name, so its decorator did nothing"
    if os.environ.get("DISABLE_KERNEL_MAPPING", "0") != "0":
        return "DISABLE_KERNEL_MAPPING is set: kernelize restores the original layers"
    return None


def diffusers_hooks() -> dict:
    """diffusers decorates no layers; its Hub attention backends need kernels >= 0.12."""
    version, kernels = installed_version("diffusers"), installed_version("kernels")
    hooks = {"version": version, "state": "not installed", "needs": None, "reason": None}
    if version is None:
        return hooks
    hooks["needs"] = f">={DIFFUSERS_KERNELS_MIN}"
    if kernels is None:
        return {**hooks, "state": "off", "reason": "kernels is not installed"}
    if release(kernels) < release(DIFFUSERS_KERNELS_MIN):
        reason = f"its Hub attention backends need kernels {hooks['needs']}; {kernels} is installed"
        return {**hooks, "state": "off", "reason": reason}
    return {**hooks, "state": "active"}


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# --- verdict and output --------------------------------------------------------------------------


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def find_problems(report: dict) -> list[str]:
    problems = []
    if report["torch"]["error"]:
        problems.append(f"torch does not import: {report['torch']['error']}")
    if report["cpu"]["isa"] is None:
        forced = report["environment"]["WARPSMITH_CPU_ISA"]
        known = forced in ("baseline", "avx2", "avx512")
        reason = (
            f"this machine has up to {report['cpu']['widest_isa']}"
            if known
            else "must be baseline, avx2 or avx512"
        )
        problems.append(f"WARPSMITH_CPU_ISA={forced}: {reason}")
    for gpu in report["gpus"]:
        if gpu["usable_by_torch"] and gpu["arch_path"] is None:
            problems.append(f"{gpu['name']} ({gpu['capability']}): {no_path_reason(report)}")
    for kernel in report["kernels"]:
        if kernel["state"] == "fails":
            problems.append(f"kernel {kernel['name']} does not load: {kernel['error']}")
    for library, hooks in report["hooks"].items():
        if hooks["state"] == "off":
            problems.append(f"{library} hooks are off: {hooks['reason']}")
    return problems


def no_path_reason(report: dict) -> str:
    forced = report["environment"]["WARPSMITH_ARCH"]
    if forced:
        return f"WARPSMITH_ARCH={forced} is not a path of this device"
    return "compute capability 7.5 or newer is needed"


Table = tuple[str, list[str], list[list[str]]]  # title, column names, rows


def tables(report: dict) -> list[Table]:
    system, torch = report["system"], report["torch"]
    rows = [
        ["python", f"{system['python']} ({system['executable']})"],
        ["OS", f"{system['os']} ({system['machine']})"],
        [
            "warpsmith",
            f"{system['warpsmith']} ({'checkout' if system['checkout'] else 'installed'})",
        ],
        ["torch", torch_text(torch)],
        ["NVIDIA driver", report["driver"] or "not found"],
        ["CPU", f"{report['cpu']['model'] or 'unknown'}; kernels use {cpu_text(report['cpu'])}"],
    ]
    gpus = [
        [
            gpu["name"],
            gpu["capability"],
            f"{gpu['memory_gib']} GiB",
            str(gpu["arch_path"] or "none"),
            "yes" if gpu["usable_by_torch"] else "no",
        ]
        for gpu in report["gpus"]
    ] or [["no GPU found", "", "", "", ""]]
    libraries = [
        [row["name"], row["installed"] or "-", row["pinned"] or "-", row["state"]]
        for row in report["libraries"]
    ]
    environment = [
        [name, "not set" if value is None else value, ENVIRONMENT[name]]
        for name, value in report["environment"].items()
    ]
    return [
        ("System", ["item", "found"], rows),
        ("GPUs", ["name", "capability", "memory", "path", "usable by torch"], gpus),
        ("Libraries", ["name", "installed", "our pin", "state"], libraries),
        ("Environment", ["variable", "value", "effect"], environment),
        ("Kernels", ["name", "state", "source", "where", "GPU archs"], kernel_rows(report)),
        ("Variants", ["kernel", "variant", "decision"], variant_rows(report)),
        ("Hooks", ["library", "version", "state", "kernels needed", "reason"], hook_rows(report)),
    ]


def torch_text(torch: dict) -> str:
    if torch["error"]:
        return f"does not import: {torch['error']}"
    return f"{torch['version']} ({'CUDA ' + torch['cuda'] if torch['cuda'] else 'CPU build'})"


def cpu_text(cpu: dict) -> str:
    if cpu["isa"] is None:
        return f"none: WARPSMITH_CPU_ISA names no path up to {cpu['widest_isa']}"
    return cpu["isa"] if cpu["isa"] == cpu["widest_isa"] else f"{cpu['isa']} (WARPSMITH_CPU_ISA)"


def kernel_rows(report: dict) -> list[list[str]]:
    rows = []
    for kernel in report["kernels"]:
        where = kernel["path"] or f"{kernel['repo_id']}, version {kernel['version']}"
        archs = ", ".join(kernel["build_archs"] or []) or "-"
        rows.append([kernel["name"], kernel["state"], kernel["source"] or "-", where, archs])
    return rows


def variant_rows(report: dict) -> list[list[str]]:
    return [
        [kernel["name"], variant["name"], "loaded" if variant["loaded"] else variant["reason"]]
        for kernel in report["kernels"]
        for variant in kernel["variants"]
    ]


def hook_rows(report: dict) -> list[list[str]]:
    return [
        [
            library,
            hooks["version"] or "-",
            hooks["state"],
            hooks.get("window") or hooks.get("needs") or "-",
            hooks["reason"] or "",
        ]
        for library, hooks in report["hooks"].items()
    ]


def print_report(report: dict) -> None:
    print_table = rich_printer() if sys.stdout.isatty() else None
    for table in tables(report):
        if table[2]:
            (print_table or print_plain)(table)
    if report["ok"]:
        unchecked = [k["name"] for k in report["kernels"] if k["state"] == "not cached"]
        if unchecked:
            print(
                f"No problem found; not tried, as not in the cache (see --hub): {', '.join(unchecked)}"
            )
        else:
            print("Everything needed works.")
        return
    print("Problems:")
    for problem in report["problems"]:
        print("- " + problem.replace("\n", "\n  "))


def rich_printer():
    """A function that prints a table with rich, or None without rich."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return None
    console = Console()

    def print_rich(table: Table) -> None:
        title, columns, rows = table
        grid = RichTable(*columns, title=title, title_justify="left")
        for row in rows:
            grid.add_row(*[Text(cell) for cell in row])  # Text: brackets in paths are not markup
        console.print(grid)

    return print_rich


def print_plain(table: Table) -> None:
    title, columns, rows = table
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(title)
    for line in lines:
        print(("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths))).rstrip())
    print()
