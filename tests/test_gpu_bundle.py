"""The bundle for a GPU machine without network: what is packed, its limits, and unpacking it."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from ci import artifact, gpu_bundle, packing, peers_bundle
from ci.gpu_bundle import Part
from ci.packing import BundleError

ROOT = Path(__file__).resolve().parents[1]
CPU_BUILDS = sorted(path.parent for path in ROOT.glob("kernels/*/build/*-cpu-*/metadata.json"))


def write_wheel(directory, name, version, requires=(), code=""):
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    files = {
        f"{name}/__init__.py": code,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))
    return wheel


def make(tmp_path, **parts):
    """Exit code of a run over these parts, and what it printed."""
    printed = io.StringIO()
    console = Console(file=printed, width=100)
    return gpu_bundle.make_bundle(parts, ROOT, tmp_path / "bundle", console), printed.getvalue()


def writes(size, name="data"):
    return lambda root, out: (out / name).write_bytes(bytes(size))


def test_a_part_over_its_limit_fails_and_is_named(tmp_path):
    code, text = make(tmp_path, small=Part(1, writes(2**20)), large=Part(1, writes(2**20 + 2**17)))
    assert code == 1
    assert "large: 1.1 MiB, over its limit of 1" in text and "small:" not in text
    assert make(tmp_path, small=Part(1, writes(2**20)))[0] == 0


def test_a_part_that_cannot_be_made_fails_and_leaves_what_was_there(tmp_path):
    def fail(root, out):
        (out / "half").touch()
        raise BundleError("no network")

    make(tmp_path, first=Part(1, writes(10)))
    code, text = make(tmp_path, first=Part(1, fail), second=Part(1, writes(10)))
    assert code == 1 and "first: no network" in text
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {"bundle/first/data", "bundle/second/data"}


def test_a_part_is_kept_while_its_stamp_fits(tmp_path):
    inputs = {"pins": ("a==1",)}
    made = []

    def run():
        part = Part(1, lambda root, out: (made.append(1), writes(10)(root, out)), lambda _: inputs)
        code, text = make(tmp_path, part=part)
        assert code == 0
        return "made" in text

    assert run() and not run()
    inputs["pins"] = ("a==2",)
    assert run() and not run()
    (tmp_path / "bundle/part/data").write_bytes(bytes(9))  # half a download
    assert run() and not run()
    (tmp_path / "bundle/part/stamp.json").write_text("{")
    assert run() and len(made) == 4


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit) as exit:
        gpu_bundle.main(["weels"])
    assert exit.value.code == 2 and "no such part: weels" in capsys.readouterr().err


def test_make_passes_the_parts_on():
    command = ["make", "-n", "--no-print-directory", "gpu-bundle", "PARTS=builds peers-a"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("-m ci.gpu_bundle builds peers-a\n")


# Requirements


def test_what_nothing_provides_is_found(tmp_path):
    requires = [
        "b>=2",
        "machine>=3",
        "unknown>=1",
        "newer>=5",
        "exact==1",
        "absent",
        "old; python_version < '3.12'",
        "new; python_version >= '3.12'",
        "more; extra == 'all'",
        "left_out",
    ]
    write_wheel(tmp_path, "a", "1", requires)
    write_wheel(tmp_path, "b", "1.9")
    has = {"machine": "3.1", "unknown": None, "newer": "4.9", "exact": None}
    found = packing.unmet(tmp_path, has, without={"left-out"})
    expected = ["b>=2", "newer>=5", "exact==1", "absent", 'new; python_version >= "3.12"']
    assert found == [f"a needs {text}" for text in expected]


def test_wheels_come_with_all_they_need_and_the_machine_lacks(tmp_path):
    index = {
        "a==1": ["b>=2", "numpy<3", "c[fast]"],
        "b==2.5": ["c", "d==7"],
        "c==4": ["a", "e; extra == 'fast'", "f; extra == 'slow'"],
        "d==7": [],
        "e==6": [],
    }
    downloads = []

    def download(directory, pins):
        downloads.append(pins)
        for pin in pins:
            write_wheel(directory, *pin.split("=="), index[pin])

    def collect(directory, versions, has):
        packing.collect([Requirement("a==1")], directory, has, versions, set(), download)

    has, versions = {"numpy": "2.5.2"}, {"b": "2.5", "c": "4", "d": "8", "e": "6"}
    collect(tmp_path / "one", versions, has)
    assert downloads == [["a==1"], ["b==2.5", "c==4"], ["d==7", "e==6"]]
    with pytest.raises(BundleError, match="no version is given for b>=2"):
        collect(tmp_path / "two", {"c": "4"}, has)
    index["b==1"] = []
    with pytest.raises(BundleError, match="^a needs b>=2$"):
        collect(tmp_path / "three", {**versions, "b": "1"}, has)


def test_the_packed_versions_are_those_of_pyproject():
    names = {requirement.name for requirement in gpu_bundle.test_roots(ROOT)}
    assert {"kernels", "transformers", "diffusers", "pytest", "hypothesis", "rich"} <= names
    assert not names & {"torch", "numpy", "triton", "opencv-python-headless"}
    a, b = peers_bundle.peers(ROOT)
    assert [requirement.name for requirement in b] == ["flashinfer-python"]
    assert {"liger-kernel", "quack-kernels", "flash-attn-4"} <= {r.name for r in a}
    pinned = gpu_bundle.test_roots(ROOT) + a + b
    assert [str(r) for r in pinned if packing.exact_version(r) is None] == []


def test_the_stamp_of_the_peers_follows_their_pins_and_modules(tmp_path, monkeypatch):
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text)
    a, b = peers_bundle.inputs_a(tmp_path), peers_bundle.inputs_b(tmp_path)
    (tmp_path / "pyproject.toml").write_text(text.replace("quack-kernels==", "quack-kernels==9"))
    assert peers_bundle.inputs_a(tmp_path) != a
    (tmp_path / "pyproject.toml").write_text(text)
    assert (peers_bundle.inputs_a(tmp_path), peers_bundle.inputs_b(tmp_path)) == (a, b)
    monkeypatch.setattr(peers_bundle, "MODULES", peers_bundle.MODULES[1:])
    assert peers_bundle.inputs_a(tmp_path) == a and peers_bundle.inputs_b(tmp_path) != b


def test_directories_are_filled_until_their_pins_change(tmp_path):
    filled = []

    def fill(directory, pins):
        filled.append(pins)
        directory.mkdir()
        (directory / pins[0]).touch()

    for pins in (["a==1"], ["a==1"], ["a==2"]):
        directory = peers_bundle.fill_once(tmp_path / "site", pins, fill)
        assert {path.name for path in directory.iterdir()} == {pins[0], peers_bundle.STAMP}
    assert filled == [["a==1"], ["a==2"]]


def test_flashinfer_keeps_what_modules_are_generated_from():
    assert peers_bundle.is_used("flashinfer/prefill.py")
    assert peers_bundle.is_used("flashinfer/data/csrc/batch_decode_customize_config.jinja")
    assert peers_bundle.is_used("flashinfer/data/include/flashinfer/norm.cuh")
    assert not peers_bundle.is_used("flashinfer/data/csrc/fused_moe/kernel.cu")
    assert not peers_bundle.is_used("flashinfer/moe_ep/kernel_src/kernel.cu")


# Builds


def sections(library):
    return subprocess.run(
        ["readelf", "-SW", library], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("build", CPU_BUILDS, ids=lambda path: path.parents[1].name)
def test_a_stripped_build_loads_and_its_digest_fits(build, tmp_path):
    (library,) = build.glob("*.so")
    assert ".symtab" in sections(library)
    copy = shutil.copytree(
        build, tmp_path / build.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    gpu_bundle.strip_variant(copy)
    assert ".symtab" not in sections(copy / library.name)
    assert (copy / library.name).stat().st_size < library.stat().st_size
    assert artifact.load_problems(copy, dirty=True) == []
    assert artifact.is_intact(copy) and artifact.is_intact(build)


def write_variant(directory, backend):
    """A build directory without a library."""
    directory.mkdir(parents=True)
    metadata = {"name": "toy", "id": "_toy", "version": 1, "license": "Apache-2.0"}
    metadata |= {"python-depends": [], "backend": {"type": backend}}
    (directory / "metadata.json").write_text(json.dumps(metadata))
    (directory / "__init__.py").touch()


def test_builds_are_made_for_every_target_and_stripped(tmp_path, monkeypatch):
    stripped = []

    def build(command, **options):
        assert command[1:3] == ["-m", "ci.build"] and f"--root={ROOT}" in command
        for target in ("cpu", "release", "ptx75", "ptx80"):
            assert f"--target={target}" in command
            write_variant(tmp_path / target / "toy/torch-1", "cpu")
        return subprocess.CompletedProcess(command, 0 if f"--out={tmp_path}" in command else 1)

    monkeypatch.setattr(gpu_bundle.subprocess, "run", build)
    monkeypatch.setattr(gpu_bundle, "strip_variant", stripped.append)
    monkeypatch.setattr(gpu_bundle.repo, "commit", lambda: ("0" * 40, True))
    gpu_bundle.make_builds(ROOT, tmp_path)
    targets = {path.relative_to(tmp_path).parts[0] for path in stripped}
    assert targets == {"cpu", "release", "ptx75", "ptx80"} and len(stripped) == 4
    assert (tmp_path / "commit").read_text() == "0" * 40 + " dirty\n"


def test_builds_that_fail_are_not_packed(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(gpu_bundle.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(BundleError, match="ci.build failed"):
        gpu_bundle.make_builds(ROOT, tmp_path)
    assert not list(tmp_path.iterdir())


# Archives and unpacking


@pytest.fixture
def checkout(tmp_path):
    """Where a bundle arrives: the script, a kernel, and a bundle of one file of each kind."""
    root = tmp_path / "checkout"
    (root / "ci").mkdir(parents=True)
    shutil.copy(ROOT / "ci/gpu_unpack.sh", root / "ci")
    bundle = root / ".gpu-bundle"
    write_wheel(bundle / "wheels", "first_toy", "1", code="x = 1")
    write_wheel(bundle / "peers-a", "shared_toy", "1", code="x = 2")
    packages = tmp_path / "packages"
    for name in ("shared_toy/more.py", "nvidia_cutlass_dsl/dsl_packages/dsl_toy.py"):
        (packages / name).parent.mkdir(parents=True)
        (packages / name).write_text("x = 3")
    packing.pack(packing.tree(packages), bundle / "peers-a/libraries.tar.xz")
    for target, variant in (("cpu", "v-cpu"), ("release", "v-cu130"), ("ptx75", "v-ptx")):
        (bundle / "builds" / target / "toy" / variant / "toy").mkdir(parents=True)
        (bundle / "builds" / target / "toy" / variant / "toy/__init__.py").write_text(target)
    (root / "kernels/toy/build/v-cpu").mkdir(parents=True)
    (root / "kernels/toy/build/v-cpu/stale.py").touch()
    return root


def unpack(checkout, cwd):
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [checkout / "ci/gpu_unpack.sh", "checkout/.gpu-bundle", "site"]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def test_unpacking(checkout, tmp_path):
    done = unpack(checkout, tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert done.stdout == f"{site}:{site}/nvidia_cutlass_dsl/dsl_packages\n"
    code = "import first_toy, shared_toy.more, dsl_toy; print(shared_toy.x, dsl_toy.x)"
    env = {**os.environ, "PYTHONPATH": done.stdout.strip()}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert shown.stdout == "2 3\n", shown.stderr
    build = checkout / "kernels/toy/build"
    files = {p.relative_to(build).as_posix(): p.read_text() for p in build.rglob("*.py")}
    assert files == {"v-cpu/toy/__init__.py": "cpu", "v-cu130/toy/__init__.py": "release"}


def test_a_checkout_that_builds_keeps_its_own_builds(checkout, tmp_path):
    (checkout / ".venv").mkdir()
    assert unpack(checkout, tmp_path).returncode == 0
    build = checkout / "kernels/toy/build"
    assert [p.relative_to(build).as_posix() for p in build.rglob("*.py")] == ["v-cpu/stale.py"]


def test_parts_are_unpacked_once_and_a_changed_one_anew(checkout, tmp_path):
    first = unpack(checkout, tmp_path)
    again = unpack(checkout, tmp_path)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    (first_wheel,) = (checkout / ".gpu-bundle/wheels").iterdir()
    first_wheel.unlink()
    write_wheel(first_wheel.parent, "second_toy", "1")
    changed = unpack(checkout, tmp_path)
    assert changed.stdout == first.stdout and "wheels has changed" in changed.stderr
    names = {path.name for path in (tmp_path / "site").iterdir()}
    assert {"second_toy", "shared_toy"} <= names and "first_toy" not in names


def test_unpacking_a_damaged_bundle_fails(checkout, tmp_path):
    archive = checkout / ".gpu-bundle/peers-a/libraries.tar.xz"
    archive.write_bytes(archive.read_bytes()[:100])
    done = unpack(checkout, tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    assert not (tmp_path / "site/.peers-a.txt").exists()


def test_archives_of_the_same_files_are_the_same(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "library.so").write_bytes(bytes(range(256)) * 40)
    (tree / "module.py").touch()
    packing.pack(packing.tree(tree), tmp_path / "one.tar.xz")
    os.utime(tree / "library.so", (1, 1))
    packing.pack(reversed(packing.tree(tree)), tmp_path / "two.tar.xz")
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
