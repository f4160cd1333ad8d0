"""ci/gpu_check.py: what counts as passed, failed and could not run."""

import json

import pytest
import torch

from ci import gpu_check, repo

TESTS = {
    "pass": "def test_a(): pass",
    "fail": "def test_a(): pass\ndef test_b(): assert 0",
    "skip": "import pytest\ndef test_a(): pytest.skip('no device')",
    "none": "x = 1",
    "error": "import a_package_that_nobody_has",
}


@pytest.fixture
def context(tmp_path):
    return gpu_check.Context(tmp_path / "results", tmp_path / "step.log")


def run_pytest(context, tmp_path, kind):
    (tmp_path / "test_it.py").write_text(TESTS[kind])
    return gpu_check.pytest(context, [str(tmp_path / "test_it.py"), "--rootdir", str(tmp_path)])


def test_passing_tests_give_their_closing_line(context, tmp_path):
    line, output = run_pytest(context, tmp_path, "pass")
    assert line.startswith("1 passed in ") and line in output
    assert "pytest" in context.log.read_text()


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("fail", gpu_check.StepFailedError, "1 failed, 1 passed in"),
        ("skip", gpu_check.CouldNotRunError, "1 skipped in"),
        ("none", gpu_check.StepFailedError, "no tests ran"),
        ("error", gpu_check.StepFailedError, "1 error in"),
    ],
)
def test_anything_else_is_no_pass(context, tmp_path, kind, error, message):
    with pytest.raises(error, match=message):
        run_pytest(context, tmp_path, kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_nothing_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path / "logs")
    steps = ["tests", "tests-ptx75", "memcheck", "bench-img2gray"]
    assert gpu_check.main([*steps, "--results", str(tmp_path)]) == 1
    (folder,) = tmp_path.glob("*/20*")
    done = json.loads((folder / "steps.json").read_text())
    assert list(done) == steps
    for step in done.values():
        assert step["result"] == "could not run" and "no CUDA device" in step["detail"]
    summary = (folder / "summary.md").read_text()
    assert summary.count("could not run") == 4
    assert summary.count("not run") == len(gpu_check.STEPS)
    assert "could not run" in capsys.readouterr().out


def test_steps_of_several_calls_make_one_summary(tmp_path, monkeypatch, capsys):
    def broken(context):
        raise gpu_check.StepFailedError("2 | 3")

    monkeypatch.setattr(gpu_check, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(gpu_check, "STEPS", {"a": lambda context: "fine", "b": broken})
    monkeypatch.setenv("WARPSMITH_COMMIT", "abc1234 clean")
    run = ["--results", str(tmp_path)]
    assert gpu_check.main(["a", *run]) == 1
    assert gpu_check.main(["b", *run]) == 1
    (folder,) = tmp_path.glob("*/20*")
    summary = (folder / "summary.md").read_text()
    assert "| a | passed | 0 | fine |" in summary and "| b | failed | 0 | 2 / 3 |" in summary
    monkeypatch.setitem(gpu_check.STEPS, "b", lambda context: "mended")
    assert gpu_check.main(["b", *run]) == 0
    assert "| b | passed | 0 | mended |" in (folder / "summary.md").read_text()


def test_unknown_steps_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(["teststs"])
    assert stop.value.code == 2
    assert "STEP: must be of builds, tests" in capsys.readouterr().err


def test_a_sanitizer_that_says_nothing_fails(context, monkeypatch):
    monkeypatch.setattr(gpu_check, "need_gpu", lambda: None)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name, path=None: "/bin/compute-sanitizer")
    for text, passes in (
        ("========= ERROR SUMMARY: 0 errors", True),
        ("========= ERROR SUMMARY: 10 errors", False),
        ("", False),
    ):

        def fake_pytest(context, arguments, prefix, text=text, **variables):
            assert (
                "sanitizer and gpu" in arguments
                and variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
            )
            return "8 passed in 1.00s", text

        monkeypatch.setattr(gpu_check, "pytest", fake_pytest)
        if passes:
            assert "8 passed" in gpu_check.sanitizer("memcheck")(context)
        else:
            with pytest.raises(gpu_check.StepFailedError, match="no summary"):
                gpu_check.sanitizer("memcheck")(context)


def test_the_summary_of_an_earlier_kernel_is_no_evidence(context, monkeypatch):
    outputs = {"a": "ERROR SUMMARY: 0 errors", "b": "nothing"}
    monkeypatch.setattr(gpu_check, "need_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "kernel_names", lambda: list(outputs))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name, path=None: "/bin/compute-sanitizer")

    def fake_pytest(context, arguments, prefix, **variables):
        output = outputs[arguments[0].split("/")[1]]
        context.log.open("a").write(output)
        return "8 passed in 1.00s", output

    monkeypatch.setattr(gpu_check, "pytest", fake_pytest)
    with pytest.raises(gpu_check.StepFailedError, match="b: no summary"):
        gpu_check.sanitizer("initcheck")(context)


def test_steps_of_another_state_of_the_code_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(gpu_check, "STEPS", {"a": lambda context: "", "b": lambda context: ""})
    for commit, status in (("abc1234 dirty", 1), ("abc1234 clean", 0)):
        monkeypatch.setenv("WARPSMITH_COMMIT", commit)
        results = ["--results", str(tmp_path / commit.split()[1])]
        assert gpu_check.main(["a", *results]) == 1
        assert gpu_check.main(["b", *results]) == status


def test_commit_of_a_copy(monkeypatch):
    monkeypatch.setenv("WARPSMITH_COMMIT", "0123456789 clean")
    assert repo.commit() == ("0123456789", False)
    monkeypatch.setenv("WARPSMITH_COMMIT", "0123456789 dirty")
    assert repo.commit() == ("0123456789", True)
    monkeypatch.delenv("WARPSMITH_COMMIT")
    monkeypatch.setattr(repo, "ROOT", repo.ROOT / "ci")  # inside a repository, but not its top
    assert repo.commit() is None
