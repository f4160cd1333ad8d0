"""warpsmith.load and `python -m warpsmith doctor`, on toy kernels written as pure Python variants."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import warpsmith
from warpsmith import __main__ as command_line
from warpsmith import doctor, loading, pins

kernels = pytest.importorskip("kernels")

ROOT = Path(__file__).resolve().parent.parent
NAME, REPO, VERSION = "toy", "warpsmith/toy-repo", 3


def write_variant(parent: Path, variant: str, marker: str, body: str = "") -> Path:
    path = parent / variant
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(f"marker = {marker!r}\n{body}\n")
    metadata = {
        "id": f"_toy_{marker}",
        "name": NAME,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (path / "metadata.json").write_text(json.dumps(metadata))
    return path


def write_checkout(root: Path) -> Path:
    kernel = root / "kernels" / NAME
    (kernel / "torch-ext").mkdir(parents=True)
    (kernel / "build.toml").write_text(
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\n[general.hub]\nrepo-id = "{REPO}"\n'
    )
    return kernel


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in set(doctor.ENVIRONMENT) - {"CUDA_VISIBLE_DEVICES"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(loading, "_hub_modules", {})


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The directory of the kernel `toy` in a checkout that warpsmith takes for its own."""
    root = tmp_path / "checkout"
    kernel = write_checkout(root)
    monkeypatch.setattr(pins, "checkout_root", lambda: root)
    return kernel


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """warpsmith as from a wheel, with a cache directory that holds nothing yet."""
    pins_file = tmp_path / "pins.toml"
    pins_file.write_text(pins.render_pins({NAME: pins.Pin(NAME, REPO, VERSION)}))
    monkeypatch.setattr(pins, "checkout_root", lambda: None)
    monkeypatch.setattr(pins, "PINS_FILE", pins_file)
    cache = tmp_path / "cache"
    monkeypatch.setenv("KERNELS_CACHE", str(cache))
    monkeypatch.setattr("kernels.resolver.CACHE_DIR", str(cache))
    return cache


def fill_cache(cache: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / f"kernels--{REPO.replace('/', '--')}"
    write_variant(repository / "snapshots" / commit / "build", "torch-universal", "cached")
    (repository / "refs").mkdir()
    (repository / "refs" / f"v{VERSION}").write_text(commit)


# --- where a kernel comes from -------------------------------------------------------------------


def test_import_brings_in_no_library():
    heavy = ["torch", "kernels", "huggingface_hub", "transformers", "diffusers", "rich"]
    code = f"import sys, warpsmith; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_unknown_name_lists_the_known_ones(checkout):
    with pytest.raises(ValueError, match=r"unknown kernel 'img2grey'; known kernels: toy"):
        warpsmith.load("img2grey")


def test_checkout_build_is_loaded_once(checkout):
    write_variant(checkout / "build", "torch-universal", "checkout")
    module = warpsmith.load(NAME)
    assert module.marker == "checkout"
    assert warpsmith.load(NAME) is module


def test_local_kernels_wins_over_the_checkout(checkout, tmp_path, monkeypatch):
    write_variant(checkout / "build", "torch-universal", "not_this")
    write_variant(tmp_path / "mine" / "build", "torch-universal", "override")
    monkeypatch.setenv("LOCAL_KERNELS", f"other/kernel=/nowhere:{REPO}={tmp_path / 'mine'}")
    assert warpsmith.load(NAME).marker == "override"
    monkeypatch.setenv("LOCAL_KERNELS", "other/kernel=/nowhere")
    assert warpsmith.load(NAME).marker == "not_this"


def test_local_kernels_needs_no_checkout_and_no_trust(installed, tmp_path, monkeypatch):
    write_variant(tmp_path / "mine" / "build", "torch-universal", "wheel_override")
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={tmp_path / 'mine'}")
    assert warpsmith.load(NAME).marker == "wheel_override"


def test_local_kernels_may_name_one_variant(checkout, tmp_path, monkeypatch):
    path = write_variant(tmp_path, "some-directory", "one_variant")
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={path}")
    assert warpsmith.load(NAME).marker == "one_variant"


def test_another_spelling_of_the_path_is_the_same_module(checkout, monkeypatch):
    write_variant(checkout / "build", "torch-universal", "spelling")
    module = warpsmith.load(NAME)
    monkeypatch.chdir(checkout.parent)
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}=toy")
    assert warpsmith.load(NAME) is module


def test_malformed_local_kernels(checkout, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "/just/a/path")
    with pytest.raises(ValueError, match=r"'/just/a/path' is not <repo id>=<path>"):
        warpsmith.load(NAME)


def test_error_inside_the_kernel_is_not_hidden(checkout):
    body = "raise OSError('undefined symbol: zap')"
    write_variant(checkout / "build", "torch-universal", "broken", body)
    with pytest.raises(OSError, match="undefined symbol: zap"):
        warpsmith.load(NAME)


def test_missing_build_names_the_make_targets(checkout):
    with pytest.raises(FileNotFoundError) as caught:
        warpsmith.load(NAME)
    message = str(caught.value)
    assert "toy has no build" in message and str(checkout / "build") in message
    assert "`make build-toy`" in message and "`make build-all`" in message


def test_backend_picks_the_variant(checkout):
    write_variant(checkout / "build", "torch-universal", "universal")
    write_variant(checkout / "build", "torch-cpu", "cpu")
    assert warpsmith.load(NAME, backend="cpu").marker == "cpu"
    reasons = {v.name: v.reason for v in loading.list_variants(checkout, "cpu")}
    assert reasons == {"torch-cpu": "", "torch-universal": "fits, but torch-cpu is preferred"}


@pytest.mark.parametrize("function", ["get_local_kernel", "get_kernel"])
def test_backend_reaches_the_library(checkout, monkeypatch, function):
    write_variant(checkout / "build", "torch-universal", f"backend_{function}")
    if function == "get_kernel":
        monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={checkout}")
    monkeypatch.setattr(kernels, function, lambda *arguments, backend=None, **options: backend)
    assert warpsmith.load(NAME, backend="cpu") == "cpu"


MISFITS = {
    "torch-xpu": r"backend \(xpu\) does not match system backend",
    "torch-stable-abi299-cpu-x86_64-linux": r"stable ABI version \(2\.99\) is too new|CPU \(x86_64\)",
    "torch113-cxx11-cpu-x86_64-linux": r"Torch version \(1\.13\) does not match|CPU \(x86_64\)",
    "torch-stable-abi211-cpu-sparc-linux": r"CPU \(sparc\) does not match",
    "release": "not a variant name",
}


@pytest.mark.parametrize("through", ["checkout", "LOCAL_KERNELS"])
def test_all_20_every_variant_that_does_not_fit_has_its_reason(checkout, monkeypatch, through):
    for number, variant in enumerate(MISFITS):
        write_variant(checkout / "build", variant, f"misfit{number}")
    if through == "LOCAL_KERNELS":
        monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={checkout}")
    with pytest.raises(FileNotFoundError) as caught:
        warpsmith.load(NAME)
    lines = str(caught.value).splitlines()
    for variant, reason in MISFITS.items():
        (line,) = [line for line in lines if line.startswith(f"  {variant}: ")]
        assert re.search(reason, line), line
    assert len(lines) == 2 + len(MISFITS), "torch-ext/ or another directory was taken for a variant"
    assert ("make build-all" if through == "checkout" else "LOCAL_KERNELS") in lines[-1]


# --- the Hub -------------------------------------------------------------------------------------


def test_installed_copy_asks_the_hub_for_the_pinned_version_once(installed, monkeypatch):
    calls = []

    def get_kernel(repo_id, **arguments):
        calls.append((repo_id, arguments))
        return ModuleType("from_hub")

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    module = warpsmith.load(NAME, trust_remote_code=[REPO])
    assert warpsmith.load(NAME) is module
    wanted = {"version": VERSION, "backend": None, "trust_remote_code": [REPO]}
    assert calls == [(REPO, wanted)]


def test_offline_kernel_comes_from_the_cache(installed, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fill_cache(installed)
    module = warpsmith.load(NAME)
    assert module.marker == "cached"
    assert warpsmith.load(NAME) is module


def test_offline_error_says_what_is_missing_and_what_helps(installed, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError) as caught:
        warpsmith.load(NAME)
    message = str(caught.value)
    assert f"cannot load toy from the Hub ({REPO}, version {VERSION})" in message
    assert "HF_HUB_OFFLINE is set" in message and f"LOCAL_KERNELS={REPO}=" in message


@pytest.mark.parametrize("trust", [False, True])
def test_unreachable_hub_is_told_from_an_untrusted_one(installed, monkeypatch, trust):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError) as caught:
        warpsmith.load(NAME, trust_remote_code=trust)
    message = str(caught.value)
    assert "Without network, HF_HUB_OFFLINE=1" in message and f"LOCAL_KERNELS={REPO}=" in message
    assert (f"trust_remote_code=['{REPO}']" in message) == (not trust)


# --- pins ----------------------------------------------------------------------------------------


def test_packaged_pins_equal_the_build_tomls():
    wanted = pins.checkout_pins(ROOT)
    assert wanted and pins.packaged_pins() == wanted, "run `python -m warpsmith pins`"
    assert set(wanted) == {path.parent.name for path in ROOT.glob("kernels/*/build.toml")}


def test_pins_command_writes_what_is_read_back(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "PINS_FILE", tmp_path / "written.toml")
    assert command_line.main(["pins"]) == 0
    assert pins.packaged_pins() == {NAME: pins.Pin(NAME, REPO, VERSION)}


def test_build_toml_without_repo_id_is_named(checkout):
    (checkout / "build.toml").write_text('[general]\nname = "toy"\nversion = 1\n')
    with pytest.raises(ValueError, match=r"toy/build\.toml: 'hub' is missing under \[general\]"):
        warpsmith.load(NAME)


def test_installed_copy_reads_its_own_pins(tmp_path):
    site = tmp_path / "site"
    shutil.copytree(ROOT / "warpsmith", site / "warpsmith")
    code = "from warpsmith import pins; print(pins.checkout_root(), sorted(pins.known_kernels()))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == f"None {sorted(pins.checkout_pins(ROOT))}"


def test_version_equals_the_project_file():
    project = pins.read_toml(ROOT / "pyproject.toml")
    if "version" in project["project"].get("dynamic", []):
        declared = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
        assert declared == "warpsmith.__version__"
    else:
        assert project["project"]["version"] == warpsmith.__version__


# --- doctor in this process ----------------------------------------------------------------------


@pytest.fixture
def no_hooks(monkeypatch):
    """Leaves the model libraries out where a test is about something else."""
    off = {"version": None, "state": "not installed", "reason": None}
    monkeypatch.setattr(doctor, "transformers_hooks", lambda: off)
    monkeypatch.setattr(doctor, "diffusers_hooks", lambda: off)


def run_json(capsys, *arguments) -> tuple[int, dict]:
    status = command_line.main(["doctor", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def run_text(capsys) -> tuple[int, str]:
    status = command_line.main(["doctor"])
    return status, capsys.readouterr().out


def test_doctor_when_all_is_well(checkout, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    write_variant(checkout / "build", "torch-universal", "well")
    write_variant(checkout / "build", "torch-xpu", "unfit")
    status, report = run_json(capsys)
    assert (status, report["ok"], report["problems"]) == (0, True, [])
    (kernel,) = report["kernels"]
    assert (kernel["name"], kernel["state"], kernel["source"]) == (NAME, "loads", "checkout")
    universal, xpu = kernel["variants"]
    assert (universal["name"], universal["loaded"]) == ("torch-universal", True)
    assert (xpu["name"], xpu["loaded"]) == ("torch-xpu", False) and "xpu" in xpu["reason"]
    assert report["hooks"]["transformers"]["state"] == "active"
    assert report["hooks"]["diffusers"]["state"] == "active"
    assert report["torch"]["version"] == sys.modules["torch"].__version__

    status, text = run_text(capsys)
    assert status == 0 and "Everything needed works." in text
    assert re.search(r"toy\s+torch-universal\s+loaded", text)
    assert re.search(r"transformers\s+[\d.]+\s+active", text)


def test_doctor_when_a_kernel_is_not_built(checkout, no_hooks, capsys):
    status, report = run_json(capsys)
    assert status == 1 and not report["ok"]
    assert report["kernels"][0]["state"] == "fails"
    assert "make build-all" in report["kernels"][0]["error"]
    status, text = run_text(capsys)
    assert status == 1 and "- kernel toy does not load: toy has no build" in text


def test_doctor_when_a_kernel_does_not_import(checkout, no_hooks, capsys):
    body = "raise OSError('undefined symbol: zap')"
    write_variant(checkout / "build", "torch-universal", "doctor_broken", body)
    status, report = run_json(capsys)
    assert status == 1
    assert report["kernels"][0]["error"] == "OSError: undefined symbol: zap"
    assert report["kernels"][0]["variants"][0]["loaded"]


def test_doctor_when_the_kernels_cannot_be_listed(checkout, no_hooks, capsys):
    (checkout / "build.toml").write_text("[general\n")
    status, report = run_json(capsys)
    assert status == 1 and "build.toml" in report["problems"][0]


def test_doctor_reads_the_cache_of_an_installed_copy(installed, no_hooks, capsys, monkeypatch):
    def no_network(*arguments, **options):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(kernels, "get_kernel", no_network)
    status, report = run_json(capsys)
    assert (status, report["kernels"][0]["state"]) == (0, "not cached")
    status, text = run_text(capsys)
    assert "(see --hub): toy" in text and "Everything needed works" not in text
    fill_cache(installed)
    status, report = run_json(capsys)
    assert (status, report["kernels"][0]["state"]) == (0, "loads")
    assert report["kernels"][0]["variants"][0]["name"] == "torch-universal"


def test_doctor_downloads_only_when_told_to(installed, no_hooks, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    status, report = run_json(capsys, "--hub")
    assert status == 1 and "cannot load toy from the Hub" in report["problems"][0]


def test_doctor_lists_gpus_that_torch_cannot_use(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in\n*driver_version*) echo 580.95.05;;\n'
        '*) echo "NVIDIA H200, 9.0, 143771"; echo "Tesla M60, 5.2, [N/A]";;\nesac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.driver_version() == "580.95.05"
    (gpu,) = doctor.gpu_info()
    wanted = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 140.4}
    assert gpu == {**wanted, "usable_by_torch": False, "arch_path": 90}


def test_doctor_lists_gpus_that_torch_uses(checkout, no_hooks, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    write_variant(checkout / "build", "torch-universal", "gpu")
    devices = [
        SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30),
        SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=16 * 2**30),
    ]
    # not torch.version.cuda: the loader would then look for CUDA variants
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    status, report = run_json(capsys)
    assert [(gpu["name"], gpu["capability"], gpu["arch_path"]) for gpu in report["gpus"]] == [
        ("NVIDIA H200", "9.0", 90),
        ("Tesla V100", "7.0", None),
    ]
    assert status == 1
    assert report["problems"] == ["Tesla V100 (7.0): compute capability 7.5 or newer is needed"]


@pytest.mark.parametrize(
    "capability, forced, path",
    [
        (75, None, 75),
        (89, "", 80),
        (120, None, 90),
        (90, "75", 75),
        (75, "80", None),
        (70, None, None),
    ],
)
def test_arch_path(capability, forced, path):
    assert doctor.arch_path(capability, forced) == path


@pytest.mark.parametrize("forced, isa", [("baseline", "baseline"), ("sse9", None)])
def test_forced_cpu_isa(monkeypatch, forced, isa):
    monkeypatch.setenv("WARPSMITH_CPU_ISA", forced)
    assert doctor.cpu_info()["isa"] == isa


def test_impossible_cpu_isa_is_a_problem(checkout, no_hooks, capsys, monkeypatch):
    write_variant(checkout / "build", "torch-universal", "isa")
    monkeypatch.setenv("WARPSMITH_CPU_ISA", "sse9")
    status, report = run_json(capsys)
    assert status == 1
    assert [p for p in report["problems"] if p.startswith("WARPSMITH_CPU_ISA=sse9")]


def test_isa_and_arch_choices_equal_those_of_the_headers():
    include = ROOT / "shared" / "include" / "warpsmith"
    isa = (include / "cpu" / "isa.h").read_text()
    asked = re.findall(r'__builtin_cpu_supports\("(\w+)"\)', isa)
    assert sorted(asked) == sorted(doctor.ISA_FLAGS["avx2"] + doctor.ISA_FLAGS["avx512"])
    (paths,) = re.findall(r"kArchPaths\[\] = \{([^}]*)\}", (include / "device_info.h").read_text())
    assert tuple(map(int, paths.split(","))) == doctor.ARCH_PATHS


def test_every_variable_the_sources_read_is_reported():
    read = set()
    for folder in ("shared", "kernels"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".h", ".cuh", ".cpp", ".cu", ".py"} and "build" not in path.parts:
                read.update(
                    re.findall(r'(?:getenv\(|environ\S*?)"(WARPSMITH_\w+)"', path.read_text())
                )
    assert {"WARPSMITH_ARCH", "WARPSMITH_CPU_ISA"} <= read
    assert read <= set(doctor.ENVIRONMENT)


def test_library_states(checkout, monkeypatch):
    (checkout.parents[1] / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["torch==2.13.0"]\n[project.optional-dependencies]\n'
        'a = ["kernels[benchmark] == 9.9", "huggingface-hub==2.4.0; python_version > \'3\'"]\n'
        'b = ["diffusers==0.1"]\n'
    )
    versions = {
        "torch": "2.13.0+cpu",
        "kernels": "0.17.2",
        "huggingface_hub": "2.4.0",
        "einops": "1",
    }
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    states = {row["name"]: row["state"] for row in doctor.library_versions()}
    assert states == {
        "torch": "ok",
        "kernels": "differs",
        "huggingface_hub": "ok",
        "einops": "no pin",
        "transformers": "not installed",
        "diffusers": "not installed",
    }


def test_disabled_kernel_mapping_turns_hooks_off(monkeypatch):
    monkeypatch.setenv("DISABLE_KERNEL_MAPPING", "1")
    reason = doctor.why_off("5.22.2", ">=0.17.2,<0.18.0", available=True, active=True)
    assert "DISABLE_KERNEL_MAPPING" in reason


def test_terminal_output_uses_tables_and_keeps_brackets(checkout, no_hooks, capsys, monkeypatch):
    pytest.importorskip("rich")
    write_variant(checkout / "build", "torch-universal", "terminal")
    monkeypatch.setenv("LOCAL_KERNELS", "a/b=/[bold]x")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    status, text = run_text(capsys)
    assert status == 0 and "┃" in text and "a/b=/[bold]x" in text


# --- doctor as a command, in altered installations -----------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """A checkout with a copy of warpsmith and a built toy kernel; returns its root."""
    root = tmp_path / "copy"
    kernel = write_checkout(root)
    write_variant(kernel / "build", "torch-universal", "copy")
    shutil.copytree(ROOT / "warpsmith", root / "warpsmith")
    return root


def doctor_command(root, *arguments, options=(), paths=(), **variables):
    # the copy comes after `paths`: its kernels/ directory must not shadow the library
    path = os.pathsep.join(map(str, [*paths, root]))
    return subprocess.run(
        [sys.executable, *options, "-m", "warpsmith", "doctor", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def site_directories() -> list[Path]:
    return [Path(p) for p in sys.path if p.endswith("site-packages") and Path(p).is_dir()]


def test_hooks_left_out_by_the_environment(copy):
    pytest.importorskip("transformers")
    result = doctor_command(copy, "--json", USE_HUB_KERNELS="NO")
    report = json.loads(result.stdout)
    assert result.returncode == 1, result.stderr
    hooks = report["hooks"]["transformers"]
    assert hooks["state"] == "off" and "USE_HUB_KERNELS=NO" in hooks["reason"]
    assert report["kernels"][0]["state"] == "loads"


def test_hooks_off_because_of_the_version_window(copy, tmp_path):
    """Metadata found first on the path makes transformers see another version of kernels."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    metadata = tmp_path / "other" / "kernels-0.16.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.16.1\n")
    (metadata / "top_level.txt").write_text("kernels\n")
    result = doctor_command(copy, paths=[metadata.parent])
    assert result.returncode == 1, result.stderr
    window = f">={import_utils.KERNELS_MIN_VERSION},<{import_utils.KERNELS_MAX_VERSION}"
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("- ")]
    assert problem.startswith("- transformers hooks are off: ")
    assert window in problem and "0.16.1" in problem
    assert re.search(r"kernels\s+0\.16\.1", result.stdout)


@pytest.mark.parametrize("missing", ["torch", "kernels", "transformers"])
def test_doctor_survives_a_missing_library(copy, tmp_path, missing):
    pytest.importorskip("transformers")
    site = tmp_path / "partial"
    site.mkdir()
    for directory in site_directories():
        for entry in directory.iterdir():
            absent = entry.name == missing or re.match(rf"{missing}-\d", entry.name)
            if not absent and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    # -S leaves out the real site-packages
    result = doctor_command(copy, "--json", options=["-S"], paths=[site])
    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    (state,) = [row["state"] for row in report["libraries"] if row["name"] == missing]
    assert state == "not installed"
    hooks, kernel = report["hooks"]["transformers"], report["kernels"][0]
    if missing == "torch":
        assert report["torch"]["error"] and hooks["state"] == "off"
    elif missing == "kernels":
        assert hooks["reason"] == "kernels is not installed"
        assert (kernel["state"], "the kernels library" in kernel["error"]) == ("fails", True)
    else:
        assert (hooks["state"], kernel["state"]) == ("not installed", "loads")
    assert result.returncode == (0 if missing == "transformers" else 1)


def test_doctor_survives_an_empty_installation(copy):
    result = doctor_command(copy, options=["-S"])
    assert result.returncode == 1 and not result.stderr
    assert "torch does not import" in result.stdout
    assert "the kernels library (`pip install kernels`): not installed" in result.stdout
