"""The builds of this repository's own kernels, as `make` left them."""

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import get_kernel, get_local_kernel
from kernels.compat import tomllib
from kernels.variants import get_variants_local, resolve_variant

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted(path.parent for path in ROOT.glob("kernels/*/build.toml"))
BUILDS = sorted(path.parent for path in ROOT.glob("kernels/*/build/*/metadata.json"))


def symbols(library, *options):
    result = subprocess.run(
        ["nm", "-DC", *options, library], capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


def test_every_kernel_has_a_cpu_build():
    built = {path.parents[1] for path in BUILDS if "-cpu-" in path.name}
    assert built == set(KERNELS)


@pytest.mark.parametrize("build", BUILDS, ids=lambda path: f"{path.parents[1].name}-{path.name}")
def test_all_12_one_build_serves_every_torch_from_2_11(build, monkeypatch):
    """C functions of the stable ABI only, and the loader takes the build for later versions of torch."""
    (library,) = build.glob("*.abi3.so")
    undefined = [line.split(maxsplit=1)[1] for line in symbols(library, "--undefined-only")]
    private = [name for name in undefined if re.search(r"\b(at|c10|torch)::", name)]
    assert undefined and not private
    if "-cpu-" not in build.name and not torch.version.cuda:
        return  # the loader refuses to look at CUDA variants here
    variants = [
        variant for variant in get_variants_local(build.parent) if variant.variant_str == build.name
    ]
    for version, fits in [("2.10.0", False), ("2.11.0", True), ("2.13.0", True), ("2.20.1", True)]:
        monkeypatch.setattr(torch, "__version__", version)
        chosen, _ = resolve_variant(variants, "cpu" if "-cpu-" in build.name else "cuda")
        assert (chosen is not None) == fits, version


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_both_loaders_find_the_same_build_without_a_warning(kernel, monkeypatch, caplog):
    general = tomllib.loads((kernel / "build.toml").read_text())["general"]
    local = get_local_kernel(kernel)
    monkeypatch.setenv("LOCAL_KERNELS", f"{general['hub']['repo-id']}={kernel}")
    by_name = get_kernel(general["hub"]["repo-id"], version=general["version"])
    assert by_name.__name__ == local.__name__
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    # A tree with changes is said to be dirty, which is as it should be.
    assert [text for text in warnings if "dirty git tree" not in text] == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_public_names_exist_and_are_documented(kernel):
    module = get_local_kernel(kernel)
    assert module.__doc__ and module.__all__ == sorted(
        module.__all__, key=lambda name: (name[0].islower(), name)
    )
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_the_hub_benchmark_has_a_reference_for_every_workload(kernel):
    """`kernels benchmark` times workloads without one too, and then shows no match."""
    spec = importlib.util.spec_from_file_location("benchmark", kernel / "benchmarks/benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (cls,) = [
        c for c in vars(module).values() if isinstance(c, type) and c.__module__ == "benchmark"
    ]
    workloads = [
        name.removeprefix("benchmark_") for name in dir(cls) if name.startswith("benchmark_")
    ]
    assert workloads
    for workload in workloads:
        benchmark = cls()
        benchmark.kernel = get_local_kernel(kernel)
        getattr(benchmark, f"setup_{workload}")()
        getattr(benchmark, f"benchmark_{workload}")()
        torch.testing.assert_close(
            benchmark.out, getattr(benchmark, f"verify_{workload}")(), rtol=1e-5, atol=1e-5
        )


def run(*command, **options):
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_the_example_runs(kernel, tmp_path):
    run(sys.executable, kernel / "example.py", cwd=tmp_path)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_the_benchmark_command_of_the_kernels_library_runs(kernel):
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("the command runs on the GPU wherever torch is a CUDA build, and there is none")
    command = Path(sys.executable).with_name("kernels")
    output = run(command, "benchmark", f"./kernels/{kernel.name}", cwd=ROOT)
    assert "Match" in output and "✗" not in output


def test_the_readme_shows_what_happens():
    text = (ROOT / "README.md").read_text()
    (session,) = re.findall(r"```pycon\n(.*?)```", text, re.DOTALL)
    example = doctest.DocTestParser().get_doctest(
        session.replace("<backend>_<id>", "..."), {"torch": torch}, "README.md", None, 0
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report = []
    runner.run(example, out=report.append)
    assert len(example.examples) > 4 and runner.failures == 0, "".join(report)
