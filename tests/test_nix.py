"""The Nix side: lock files, ci/check-nix.sh and the target builds of the root flake.

Nothing here needs a network: the flakes are evaluated against the stand-in of
ci/nix, in scratch git repositories, because nix sees only what git tracks.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels.compat import tomllib

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted(toml.parent for toml in ROOT.glob("kernels/*/build.toml"))

TOY_BUILD_TOML = """\
[general]
name = "toy"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "warpsmith/toy"

[torch]
src = ["torch-ext/torch_binding.cpp"]

[torch.stable-abi]
cpu = "2.11"
cuda = "2.11"

[kernel.toy_cpu]
backend = "cpu"
depends = ["torch"]
include = ["include", "."]
src = ["include/toy.h", "toy_cpu/toy.cpp"]

[kernel.toy_cuda]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = ["7.5", "8.0", "9.0+PTX"]
include = ["include"]
src = ["include/toy.h", "toy_cpu/toy.cpp", "toy_cuda/toy.cu"]

[kernel.toy_sm90]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = ["9.0a"]
include = ["include"]
src = ["include/toy.h", "toy_cuda/toy_sm90.cu"]
"""
TOY_FILES = [
    "include/toy.h",
    "toy_cpu/toy.cpp",
    "toy_cuda/toy.cu",
    "toy_cuda/toy_sm90.cu",
    "torch-ext/torch_binding.cpp",
    "torch-ext/toy/__init__.py",
]
TOY_VARIANT = "torch-stable-abi211-cu130-x86_64-linux"


def require_nix():
    if shutil.which("nix") is None:
        if os.environ.get("CI"):
            pytest.fail("nix is not on PATH, and CI is set (Debian: apt-get install nix-bin)")
        pytest.skip("nix is not on PATH (Debian: apt-get install nix-bin)")


def clean_env(**extra):
    """The environment without git's own variables, which a git hook would set."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return {**env, **extra}


def git(repo, *args):
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(
        ["git", *identity, *args], cwd=repo, env=clean_env(), check=True, capture_output=True
    )


def commit_all(repo):
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "all")


def copy_files(source, target, names):
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)


def copy_nix_side(target):
    copy_files(ROOT, target, ["flake.nix", "flake.lock", "ci/check-nix.sh"])
    shutil.copytree(ROOT / "ci/nix", target / "ci/nix")


def listed_sources(build):
    sections = [build["torch"], *build.get("kernel", {}).values()]
    return [file for section in sections for file in section.get("src", [])]


def make_toy_repository(repo):
    copy_nix_side(repo)
    toy = repo / "kernels/toy"
    for name in TOY_FILES:
        (toy / name).parent.mkdir(parents=True, exist_ok=True)
        (toy / name).touch()
    (toy / "build.toml").write_text(TOY_BUILD_TOML)
    shutil.copy2(KERNELS[0] / "flake.nix", toy)
    shutil.copy2(ROOT / "flake.lock", toy)
    # Not a kernel: it holds no build.toml.
    (repo / "kernels/notes").mkdir()
    (repo / "kernels/notes/README.md").touch()
    commit_all(repo)
    return repo


@pytest.fixture(scope="module")
def pristine_toy(tmp_path_factory):
    require_nix()
    return make_toy_repository(tmp_path_factory.mktemp("nix") / "repository")


@pytest.fixture
def toy_repo(pristine_toy, tmp_path):
    return Path(shutil.copytree(pristine_toy, tmp_path / "repository", symlinks=True))


def check_nix(repo):
    done = subprocess.run(
        ["ci/check-nix.sh"],
        cwd=repo,
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def assert_passes(repo, kernel_names):
    code, output = check_nix(repo)
    assert code == 0, output
    for name in kernel_names:
        assert re.search(rf"kernels/{name}: [1-9]\d* derivations evaluate", output), output
    assert "Not shown" in output


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Locks


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernel_lock_equals_root_lock(kernel):
    assert (kernel / "flake.lock").read_bytes() == (ROOT / "flake.lock").read_bytes(), (
        "run `make sync-locks`"
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernel_flake_has_the_input_of_the_root_flake(kernel):
    def inputs(flake):
        return re.findall(r"^ *inputs.*$", flake.read_text(), re.MULTILINE)

    assert len(inputs(ROOT / "flake.nix")) == 1
    assert inputs(kernel / "flake.nix") == inputs(ROOT / "flake.nix")


def test_lock_pins_kernel_builder():
    nodes = json.loads((ROOT / "flake.lock").read_text())["nodes"]
    assert nodes["root"]["inputs"] == {"kernel-builder": "kernel-builder"}
    locked = nodes["kernel-builder"]["locked"]
    assert (locked["owner"], locked["repo"]) == ("huggingface", "kernels")
    assert re.fullmatch("[0-9a-f]{40}", locked["rev"])


# Trees that pass


def test_the_kernels_of_this_repository_pass(tmp_path):
    require_nix()
    copy_nix_side(tmp_path)
    for kernel in KERNELS:
        build = tomllib.loads((kernel / "build.toml").read_text())
        python_files = [str(file.relative_to(kernel)) for file in kernel.glob("torch-ext/**/*.py")]
        names = ["build.toml", "flake.nix", "flake.lock", *listed_sources(build), *python_files]
        copy_files(kernel, tmp_path / "kernels" / kernel.name, names)
    commit_all(tmp_path)
    assert_passes(tmp_path, [kernel.name for kernel in KERNELS])


def test_two_cuda_sections_pass(pristine_toy):
    assert_passes(pristine_toy, ["toy"])


def test_dirty_tree_passes(toy_repo):
    (toy_repo / "kernels/toy/toy_cuda/toy.cu").write_text("// changed\n")
    (toy_repo / "untracked.nix").write_text("{")
    assert_passes(toy_repo, ["toy"])


@pytest.mark.parametrize(("name", "options"), [("shallow", ["--depth=1"]), ("with a space", [])])
def test_clone_passes(toy_repo, tmp_path, name, options):
    git(toy_repo, "commit", "-q", "--allow-empty", "-m", "second")
    git(tmp_path, "clone", "-q", *options, toy_repo.as_uri(), name)
    assert (tmp_path / name / ".git/shallow").exists() == bool(options)
    assert_passes(tmp_path / name, ["toy"])


# Trees that fail


def parent_in_src(toy):
    edit(toy / "build.toml", '"toy_cuda/toy.cu"', '"toy_cuda/toy.cu", "../shared/shared.h"')
    (toy.parent / "shared").mkdir()
    (toy.parent / "shared/shared.h").touch()


def symlinked_header(toy):
    (toy / "include/toy.h").rename(toy / "toy_cpu/toy.h")
    (toy / "include/toy.h").symlink_to("../toy_cpu/toy.h")


def symlinked_directory(toy):
    (toy / "include").rename(toy / "headers")
    (toy / "include").symlink_to("headers")


def untracked_source(toy):
    edit(toy / "build.toml", '"toy_cuda/toy.cu"', '"toy_cuda/toy.cu", "toy_cuda/new.cu"')
    git(toy, "add", "-A")
    (toy / "toy_cuda/new.cu").touch()


def unlisted_header(toy):
    edit(toy / "build.toml", '"include/toy.h", ', "")


def unknown_argument(toy):
    edit(toy / "flake.nix", "inherit self;", "inherit self; cudaCapability = 9;")


def changed_input_url(toy):
    edit(toy / "flake.nix", "huggingface/kernels", "huggingface/kernels/some-branch")


def differing_lock(toy):
    (toy / "flake.lock").write_text((toy / "flake.lock").read_text() + "\n")


def untracked_lock(toy):
    git(toy, "rm", "-q", "--cached", "flake.lock")


def syntax_error(toy):
    edit(toy / "flake.nix", "path = ./.;", "path = ./.")


def capabilities_over_lines(toy):
    edit(toy / "build.toml", '["7.5", "8.0", "9.0+PTX"]', '[\n  "7.5",\n  "8.0",\n]')


def no_capabilities(toy):
    edit(toy / "build.toml", 'cuda-capabilities = ["9.0a"]\n', "")


def misspelt_capability(toy):
    edit(toy / "build.toml", '["9.0a"]', '["sm_90a"]')


def capability_that_no_cuda_has(toy):
    edit(toy / "build.toml", '["9.0a"]', '["9.1a"]')


def source_in_two_cuda_sections(toy):
    edit(toy / "build.toml", '"toy_cuda/toy_sm90.cu"', '"toy_cuda/toy_sm90.cu", "toy_cuda/toy.cu"')


def unknown_depends(toy):
    edit(toy / "build.toml", 'depends = ["torch"]', 'depends = ["torch", "eigen"]')


FAILURES = [
    (parent_in_src, r"toy/build\.toml: \.\./shared/shared\.h is outside of the kernel's directory"),
    (symlinked_header, r"toy/build\.toml: include/toy\.h goes through a symbolic link"),
    (symlinked_directory, r"toy/build\.toml: include\S* goes through a symbolic link"),
    (untracked_source, r"toy/build\.toml: toy_cuda/new\.cu is not in the git tree"),
    (unlisted_header, r"toy/build\.toml: include directory include holds no file that src lists"),
    (unknown_argument, r"unexpected argument 'cudaCapability'(?s:.*)FAILED: kernels/toy: "),
    (changed_input_url, r"FAILED: kernels/toy: flake\.lock does not cover flake\.nix"),
    (differing_lock, r"FAILED: kernels/toy/flake\.lock differs from flake\.lock"),
    (untracked_lock, r"FAILED: kernels/toy/flake\.lock is not tracked by git"),
    (syntax_error, r"syntax error(?s:.*)FAILED: kernels/toy/flake\.nix does not parse"),
    (capabilities_over_lines, r"toy/build\.toml: write cuda-capabilities = \[\.\.\.\] on one line"),
    (no_capabilities, r"toy/build\.toml: \[kernel\.toy_sm90\] has no cuda-capabilities"),
    (misspelt_capability, r'toy/build\.toml: \[kernel\.toy_sm90\] has the capability "sm_90a"'),
    (
        capability_that_no_cuda_has,
        r"toy/build\.toml: \[kernel\.toy_sm90\] has no capability that cu126",
    ),
    (source_in_two_cuda_sections, r"toy/build\.toml: toy_cuda/toy\.cu is in two cuda sections"),
    (unknown_depends, r"toy/build\.toml: \[kernel\.toy_cpu\] depends on unknown eigen"),
]


@pytest.mark.parametrize(
    ("change", "message"), FAILURES, ids=lambda value: getattr(value, "__name__", "")
)
def test_mistake_is_reported(toy_repo, change, message):
    change(toy_repo / "kernels/toy")
    if change not in (untracked_source, untracked_lock):
        git(toy_repo, "add", "-A")
    code, output = check_nix(toy_repo)
    assert code == 1, output
    assert re.search(message, output), output
    assert "passed" not in output


# Target builds of the root flake


@pytest.fixture(scope="module")
def nix_eval(pristine_toy, tmp_path_factory):
    """Evaluates an attribute of the toy repository's root flake against the stand-in."""
    scratch = tmp_path_factory.mktemp("nix-store")
    settings = ["experimental-features = nix-command flakes", "substituters =", "flake-registry ="]
    # nix 2.8 misreads a script that comes from its evaluation cache.
    settings += ["build-users-group =", "sandbox = false", "eval-cache = false"]
    env = clean_env(
        NIX_STORE_DIR=str(scratch / "store"),
        NIX_STATE_DIR=str(scratch / "state"),
        NIX_LOG_DIR=str(scratch / "log"),
        NIX_CONF_DIR=str(scratch),
        NIX_USER_CONF_FILES="/dev/null",
        NIX_REMOTE="",
        NIX_CONFIG="\n".join(settings),
        XDG_CACHE_HOME=str(scratch / "cache"),
    )
    stub = f"path:{pristine_toy}/ci/nix/stub-kernel-builder"
    flags = ["--no-write-lock-file", "--override-input", "kernel-builder", stub]

    def evaluate(attribute, how):
        command = ["nix", "eval", how, f"git+file://{pristine_toy}#{attribute}", *flags]
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return evaluate


def rewrite_script(nix_eval, target):
    return nix_eval(
        f"legacyPackages.x86_64-linux.targets.{target}.toy.{TOY_VARIANT}.src.script", "--raw"
    )


def run_rewrite(script, out):
    """Runs a derivation's script as it is, with a kernel-builder that records its arguments."""
    program = Path(re.search(r"\S+/bin/kernel-builder", script).group())
    if not program.exists():
        program.parent.mkdir(parents=True)
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$out/arguments"\n')
        program.chmod(0o755)
    return subprocess.run(
        ["bash", "-e", "-c", script],
        env=clean_env(out=str(out)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_root_flake_finds_kernels_by_build_toml(nix_eval):
    lib = json.loads(nix_eval("lib", "--json"))
    assert lib["kernelNames"] == ["toy"]
    assert lib["targets"] == {"h100": "9.0a", "a100": "8.0", "t4": "7.5"}


@pytest.mark.parametrize(
    ("target", "capability"), [("h100", "9.0a"), ("a100", "8.0"), ("t4", "7.5")]
)
def test_target_build_rewrites_every_capability_list(nix_eval, tmp_path, target, capability):
    out = tmp_path / "out"
    done = run_rewrite(rewrite_script(nix_eval, target), out)
    assert done.returncode == 0, done.stderr

    before = tomllib.loads(TOY_BUILD_TOML)
    after = tomllib.loads((out / "build.toml").read_text())
    lists = {
        name: section["cuda-capabilities"]
        for name, section in after["kernel"].items()
        if section["backend"] == "cuda"
    }
    assert lists == {"toy_cuda": [capability], "toy_sm90": [capability]}
    for build in (before, after):
        for section in build["kernel"].values():
            section.pop("cuda-capabilities", None)
    assert before == after

    arguments = (out / "arguments").read_text().split()
    assert arguments[:3] == ["create-pyproject", "--force", "--unique-id"]
    assert re.fullmatch("[A-Za-z0-9_]+", arguments[3])
    assert arguments[-1] == str(out)


@pytest.mark.parametrize(
    "capabilities",
    [
        'cuda-capabilities = [\n  "9.0a",\n]',
        '  cuda-capabilities = ["9.0a"]',
        'cuda-capabilities=["9.0a"]',
    ],
)
def test_target_build_refuses_a_list_that_it_cannot_rewrite(nix_eval, tmp_path, capabilities):
    script = rewrite_script(nix_eval, "a100")
    source = re.search(r"--no-preserve=mode (\S+) \$out", script).group(1)
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    (copy / "build.toml").chmod(0o644)
    edit(copy / "build.toml", 'cuda-capabilities = ["9.0a"]', capabilities)
    done = run_rewrite(script.replace(source, str(copy)), tmp_path / "out")
    assert done.returncode != 0
    assert "on one line" in done.stderr
    assert not (tmp_path / "out/arguments").exists()


def test_target_bundle_holds_every_cuda_variant(nix_eval):
    script = nix_eval("packages.x86_64-linux.toy-h100.script", "--raw")
    variants = json.loads(nix_eval("legacyPackages.x86_64-linux.kernels.toy.variants", "--json"))
    cuda = [name for name in variants if "-cu1" in name]
    assert TOY_VARIANT in cuda
    assert script.count("cp -r ") == len(cuda)
