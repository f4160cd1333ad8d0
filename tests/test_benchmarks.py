"""benchmarks/: what is timed and how it is judged, the files it writes, README.md's section."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import (
    diff,
    environment,
    markdown,
    models,
    plot,
    readme,
    report,
    run,
    suites,
    timing,
)
from benchmarks.case import BUILTIN, COMPILE, EAGER, OURS, PEER, Case, Provider, ready
from benchmarks.report import FAILED, MISSING, OK, WRONG, CaseResult, Report, Row
from benchmarks.timing import Timing

ROOT = Path(__file__).resolve().parents[1]


def timed(*repeats):
    us = sorted(repeats)[len(repeats) // 2]
    return Timing(us, us - 1, us + 1, tuple(repeats), "graph", 3, 30)


# --- timing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ours, other, expected",
    [
        ((102, 102, 102), (100, 100, 100), True),
        ((103, 103, 103), (100, 100, 100), False),
        ((1.10, 1.10, 1.10), (1.01, 1.01, 1.01), True),  # within 0.1 us
        ((1.12, 1.12, 1.12), (1.01, 1.01, 1.01), False),
        ((110, 100, 100), (100, 100, 100), True),  # one repeat in three is disturbed
        ((110, 110, 100), (100, 100, 100), False),
        ((50, 50, 50), (100, 100, 100), True),
    ],
)
def test_not_slower(ours, other, expected):
    assert timing.not_slower(timed(*ours), timed(*other)) is expected


def test_ratio_is_taken_repeat_by_repeat():
    # The machine slowed down for both: the medians of each would say 1.5.
    assert timing.ratio(timed(10, 15, 20), timed(10, 10, 20)) == 1.0


def test_input_sets_exceed_the_cache_within_limits():
    assert timing.count_sets(10, 1000, 3, 48) == 48
    assert timing.count_sets(100, 1000, 3, 48) == 10
    assert timing.count_sets(1000, 1000, 3, 48) == 3
    assert timing.count_sets(0, 1000, 3, 48) == 48


class RecordedTimer:
    how, sets = "graph", 4

    def __init__(self, name, log, values):
        self.name, self.log, self.values = name, log, values

    def sample(self, budget_ms):
        self.log.append(self.name)
        return self.values


def test_interleave_begins_with_each_timer_in_turn_and_takes_medians():
    log = []
    timers = {name: RecordedTimer(name, log, [4, 4, 4]) for name in "abc"}
    timers["a"].values = [1, 2, 9]
    result = timing.interleave(timers, slices=2)
    assert log == list("abcbca" + "cababc" + "bcacab")
    assert result["a"].us == 2 and result["a"].repeats == (2, 2, 2)
    assert (result["a"].p20, result["a"].p80) == (1, 9)
    assert result["b"].samples == 18


def test_cpu_timer_rotates_its_inputs(monkeypatch):
    monkeypatch.setattr(timing, "CPU_BURST_S", 0.0)
    seen = []
    timer = timing.CpuTimer(seen.append, [(1,), (2,), (3,)], start=1)
    for _ in range(4):
        assert timer.sample(1.0)[0] >= 0
    assert seen == [2, 3, 1, 2]


def test_cpu_timer_gives_the_mean_of_a_burst(monkeypatch):
    clock = iter([0.0, 2e-4, 4e-4, 6e-4])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    seen = []
    assert timing.CpuTimer(seen.append, [(1,), (2,)]).sample(1.0) == [pytest.approx(200)]
    assert seen == [1, 2, 1]


def test_cpu_timers_of_a_case_begin_at_different_inputs(monkeypatch):
    starts = []
    original = timing.CpuTimer

    def recording(function, input_sets, start=0):
        starts.append(start)
        return original(function, input_sets, start)

    monkeypatch.setattr(timing, "CpuTimer", recording)
    others = [Provider(f"other {i}", PEER, ready(lambda x: 2 * x)) for i in range(3)]
    case = dataclasses.replace(toy_case(*others), sets=(8, 8))
    run.measure(case, "cpu", lambda step: None)
    assert starts[1:] == [0, 2, 4, 6]  # after the copy


# --- measuring a case ----------------------------------------------------------------------------


def missing():
    import a_package_that_nobody_has  # noqa: F401


def failing(x):
    raise RuntimeError("no kernel for this shape\nwith a second line")


def in_place(x):
    return x.mul_(2)


def toy_case(*providers):
    return Case(
        group="toy",
        name="64",
        make_inputs=lambda: (torch.rand(64) + 1,),
        reference=lambda x: 2 * x.double(),
        tolerance=1e-6,
        providers=[Provider("right", OURS, ready(lambda x: x + x)), *providers],
        num_bytes=512,
        sets=(2, 2),
    )


def measured(*providers):
    steps = []
    result = run.measure(toy_case(*providers), "cpu", steps.append)
    assert steps == ["right", *(provider.name for provider in providers), "timing"]
    return {row.provider: row for row in result.rows}


def test_right_providers_are_timed():
    row = measured()["right"]
    assert row.status == OK and row.difference < 1e-7
    assert row.timing.us > 0 and row.timing.how == "cpu" and row.timing.sets == 2


@pytest.mark.parametrize(
    "function, note",
    [
        (lambda x: 3 * x, "differs from float64"),
        (lambda x: x * float("nan"), "differs from float64"),
        (lambda x: x + x + 1e-5, "differs from float64"),
        (lambda x: (x + x)[:1], r"gives shape \(1,\), not \(64,\)"),
        (lambda x: (x + x).sum(), r"gives shape \(\), not \(64,\)"),
        (lambda x: (x + x).double(), "gives torch.float64 for torch.float32"),
    ],
)
def test_wrong_results_are_not_timed(function, note):
    rows = measured(Provider("wrong", PEER, ready(function)))
    assert rows["wrong"].status == WRONG and rows["wrong"].timing is None
    assert re.search(note, rows["wrong"].note)
    assert rows["right"].timing is not None


def test_what_is_not_installed_or_fails_is_said():
    rows = measured(Provider("absent", PEER, missing), Provider("failing", PEER, ready(failing)))
    assert rows["absent"].status == MISSING and "a_package_that_nobody_has" in rows["absent"].note
    assert rows["failing"].status == FAILED
    assert rows["failing"].note == "RuntimeError: no kernel for this shape"
    assert rows["absent"].timing is rows["failing"].timing is None


def test_providers_that_write_to_their_inputs_spoil_no_others():
    made = []

    def make_inputs():
        made.append(torch.rand(64) + 1)
        return (made[-1],)

    providers = [Provider(name, PEER, ready(in_place)) for name in ("in place", "last")]
    case = dataclasses.replace(toy_case(*providers), make_inputs=make_inputs)
    rows = run.measure(case, "cpu", lambda step: None).rows
    assert [row.status for row in rows] == [OK, OK, OK]
    assert [row.writes_inputs for row in rows] == [False, True, True]
    assert all(row.timing is not None for row in rows)
    assert len(made) == 2 and all(x.min() >= 1 and x.max() <= 2 for x in made)


def sum_and_product(x, y):
    return x + y, x * y


def two_results(*providers):
    case = Case(
        group="toy",
        name="two results",
        make_inputs=lambda: (torch.rand(64) + 1, torch.rand(64) + 1),
        reference=lambda x, y: sum_and_product(x.double(), y.double()),
        tolerance=1e-6,
        providers=[Provider("right", OURS, ready(sum_and_product)), *providers],
        num_bytes=1024,
        sets=(2, 2),
    )
    return {row.provider: row for row in run.measure(case, "cpu", lambda step: None).rows}


@pytest.mark.parametrize(
    "function, note",
    [
        (lambda x, y: (x + y, 1.01 * x * y), "differs from float64"),
        (lambda x, y: (x * float("nan"), x * y), "differs from float64"),
        (lambda x, y: (x + y, x * float("nan")), "differs from float64"),
        (
            lambda x, y: (x + y, (x * y)[:1]),
            r"gives shape \(64,\) and \(1,\), not \(64,\) and \(64",
        ),
        (lambda x, y: (x + y,), r"gives shape \(64,\), not \(64,\) and \(64,\)"),
        (lambda x, y: x + y, r"gives shape \(64,\), not \(64,\) and \(64,\)"),
        (lambda x, y: (x + y, (x * y).double()), "gives torch.float64 for torch.float32"),
    ],
)
def test_every_result_of_several_is_compared(function, note):
    rows = two_results(Provider("wrong", PEER, ready(function)))
    assert rows["right"].status == OK and rows["right"].timing is not None
    assert rows["wrong"].status == WRONG and rows["wrong"].timing is None
    assert re.search(note, rows["wrong"].note)


def test_prepared_inputs_are_compared_in_the_layout_of_the_reference():
    provider = Provider(
        "transposed",
        PEER,
        ready(lambda x: 2 * x),
        prepare=lambda inputs: (inputs[0].view(8, 8).T.contiguous(),),
        result=lambda out: out.T.reshape(64),
    )
    assert measured(provider)["transposed"].status == OK


# --- on a GPU ------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gpu_case(*providers):
    size = 1 << 20
    return Case(
        group="toy",
        name="1M",
        make_inputs=lambda: (torch.rand(size, device="cuda"),),
        reference=lambda x: 2 * x.double(),
        tolerance=1e-6,
        providers=[Provider("right", OURS, ready(lambda x: x + x)), *providers],
        num_bytes=8 * size,
        host_time=True,
    )


@needs_gpu
@pytest.mark.gpu
def test_graphs_time_what_they_should():
    cycles = [(1_000_000,)] * 4
    timers = {
        "once": timing.GraphTimer(torch.cuda._sleep, cycles),
        "twice": timing.GraphTimer(lambda n: torch.cuda._sleep(2 * n), cycles),
    }
    times = timing.interleave(timers)
    assert 300 < times["once"].us < 3000
    assert timing.ratio(times["twice"], times["once"]) == pytest.approx(2, rel=0.05)
    assert times["once"].p20 <= times["once"].us <= times["once"].p80


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_case_is_checked_timed_and_compared_with_a_copy():
    result = run.measure(gpu_case(Provider("in place", PEER, ready(in_place))), "cuda", print)
    rows = {row.provider: row for row in result.rows}
    assert rows["right"].status == rows["in place"].status == OK
    assert rows["in place"].writes_inputs
    # 8 MiB at 0.1 to 10 TB/s
    assert 0.8 < rows["right"].timing.us < 100 and rows["right"].timing.how == "graph"
    assert 0.5 < result.copy.us / rows["right"].timing.us < 2
    assert result.copy.sets == rows["right"].timing.sets >= 3
    assert 1 < rows["right"].host_us < 200 and 1 < result.host_reference_us < 200


@needs_gpu
@pytest.mark.gpu
def test_graphs_that_compute_something_else_are_wrong():
    calls = []

    def right_when_called_eagerly(x):
        calls.append(x)
        return x + x if not torch.cuda.is_current_stream_capturing() else torch.empty_like(x)

    result = run.measure(
        gpu_case(Provider("absent", PEER, ready(right_when_called_eagerly))), "cuda", print
    )
    assert calls and result.rows[1].status == WRONG and result.rows[1].timing is None
    assert result.rows[0].status == OK


@needs_gpu
@pytest.mark.gpu
def test_replays_that_write_to_their_inputs_begin_with_fresh_ones():
    def right_when_called_eagerly(x):
        return x.mul_(2) if not torch.cuda.is_current_stream_capturing() else x.mul_(3)

    providers = [
        Provider("in place", PEER, ready(in_place)),
        Provider("wrong", PEER, ready(right_when_called_eagerly)),
    ]
    rows = run.measure(gpu_case(*providers), "cuda", print).rows
    assert [row.status for row in rows] == [OK, OK, WRONG]


@needs_gpu
@pytest.mark.gpu
def test_gradients_are_captured_without_their_forward():
    from benchmarks.suites import rmsnorm

    cases = {
        build: build("cuda", rmsnorm.LLAMA, 2048)
        for build in (rmsnorm.backward, rmsnorm.forward_and_backward)
    }
    times = {}
    with torch.no_grad():
        for build, case in cases.items():
            chosen = [p for p in case.providers if p.kind in (EAGER, BUILTIN, COMPILE)]
            result = run.measure(dataclasses.replace(case, providers=chosen), "cuda", print)
            assert [(row.status, row.note) for row in result.rows] == [(OK, "")] * len(chosen)
            times[build] = [row.timing.us for row in result.rows]
    for alone, both in zip(*times.values()):
        assert alone < both


# --- suites --------------------------------------------------------------------------------------


def cases_of(kernel, device):
    return list(importlib.import_module(f"benchmarks.suites.{kernel}").cases(device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", suites.NAMES)
def test_cases_have_names_of_their_own(kernel, device):
    cases = cases_of(kernel, device)
    names = [(case.group, case.name) for case in cases]
    assert len(names) == len(set(names)) > 0
    for case in cases:
        providers = [provider.name for provider in case.providers]
        assert len(providers) == len(set(providers))
        assert case.num_bytes > 0 and (case.flops is None or case.flops > 0)
        assert device == "cuda" or not case.host_time


def test_every_kernel_has_a_suite_with_it():
    kernels = {path.parent.name for path in ROOT.glob("kernels/*/build.toml")}
    with_ours = {
        kernel
        for kernel in suites.NAMES
        if all(any(p.kind == OURS for p in case.providers) for case in cases_of(kernel, "cuda"))
    }
    assert kernels == with_ours


def test_gray_shapes_of_the_published_baselines_are_measured():
    from benchmarks.suites import img2gray

    names = {(case.group, case.name) for case in cases_of("img2gray", "cuda")}
    for dtype, layout, batch, frame in img2gray.PUBLISHED_BASELINES:
        assert (f"{dtype} {layout}", f"{frame} x{batch}") in names


@pytest.mark.parametrize("kernel", suites.NAMES)
def test_formulas_agree_with_float64(kernel):
    """The smallest CPU case of each group, without what compiles."""
    smallest = {}
    for case in sorted(cases_of(kernel, "cpu"), key=lambda case: -case.num_bytes):
        smallest[case.group] = case
    for case in smallest.values():
        inputs = case.make_inputs()
        reference = case.reference(*inputs)
        for provider in case.providers:
            if provider.kind in (EAGER, BUILTIN, OURS):
                row = Row(provider.name, provider.kind, OK)
                try:
                    function = provider.load()
                except ImportError:
                    assert provider.kind == BUILTIN
                    continue
                run.check(case, provider, function, [inputs], reference, row)
                assert row.status == OK, (case.name, provider.name, row.note)


def test_counted_bytes_are_those_of_the_tensors():
    for kernel in suites.NAMES:
        for case in cases_of(kernel, "cpu"):
            inputs = case.make_inputs()
            provider = next(p for p in case.providers if p.kind in (EAGER, BUILTIN))
            output = provider.load()(*provider.prepare(inputs))
            tensors = [*inputs, *run.as_tuple(output)]
            if case.group.endswith("forward and backward"):
                tensors += inputs[:2]  # x and weight, which both read
            assert case.num_bytes == sum(t.numel() * t.element_size() for t in tensors), case.name


def test_norms_of_llama_count_their_passes_and_are_in_the_readme():
    passes = {
        "bfloat16, weight": 2,
        "bfloat16, residual add": 4,
        "bfloat16, residual add in place": 4,
        "bfloat16, backward": 3,
        "bfloat16, forward and backward": 5,
    }
    found = {(case.group, case.name): case for case in cases_of("rmsnorm", "cuda")}
    for group, count in passes.items():
        case = found[group, "16384 x 4096 (Llama-3.1-8B)"]
        assert case.num_bytes // (16384 * 4096 * 2) == count
        assert case.in_readme
    decode = found["bfloat16, weight", "16 x 4096 (Llama-3.1-8B)"]
    assert decode.host_time and "F.rms_norm" in {provider.name for provider in decode.providers}


def test_models_are_consistent():
    for name, model in models.DIFFUSION.items():
        assert model.heads * model.head_dim == model.hidden_size, name
    for name, model in models.LANGUAGE.items():
        assert model.heads % model.kv_heads == 0, name


# --- reports -------------------------------------------------------------------------------------


@pytest.fixture
def result():
    """A win, a loss to one of three, and a shape where ours failed."""

    def rows(ours, compiled, peer):
        return [
            Row(
                "warpsmith", OURS, OK if ours else FAILED, "", 0.0, ours and timed(*[ours] * 3), 7.5
            ),
            Row("compile", COMPILE, OK, "", 0.0, timed(*[compiled] * 3), 40.0),
            Row("liger", PEER, OK, "", 0.0, timed(*[peer] * 3)),
            Row("quack", PEER, MISSING, "ImportError: no quack"),
        ]

    where = {"date": "2026-11-30", "commit": "abc1234", "device": "NVIDIA H200", "python": "3.12.3"}
    where |= {
        "driver": "580.1",
        "cuda": "13.0",
        "libraries": {"torch": "2.11.0"},
        "l2_bytes": 7_000_000,
    }
    cases = [
        CaseResult("bf16", "win", 2_000_000, None, timed(8, 8, 8), rows(10, 20, 11), 8.0),
        CaseResult("bf16", "loss", 4_000_000, None, timed(8, 8, 8), rows(10, 20, 9), 8.0),
        CaseResult("bf16", "broken", 4_000_000, 8e6, timed(8, 8, 8), rows(None, 20, 9)),
    ]
    return Report("toy", "cuda", where, "_toy_cuda_1", {"bf16 matrix TFLOP/s": 2.0}, cases)


def test_json_keeps_everything(result, tmp_path):
    result.save(tmp_path / "new" / "toy.json")
    assert report.read(tmp_path / "new" / "toy.json") == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["toy.json"]


def test_what_a_report_says(result):
    win, loss, broken = result.cases
    assert win.fastest().provider == "liger" and win.fastest_compiled.provider == "compile"
    assert win.slower_than() == []
    assert [row.provider for row in loss.slower_than()] == ["liger"]
    assert broken.ours is None
    assert result.ceiling_us(win) == 8 and result.ceiling_us(broken) == 4


def test_markdown_shows_losses_and_what_is_missing(result):
    lines = {
        line.split("|")[1].strip(): line
        for line in markdown.full(result).splitlines()
        if "|" in line
    }
    assert (
        "| 10.00 [h 7.5] | 9.00 to 11.00 | 80 % | 0.91 | none | liger | 11.00 |"
        in lines["win (L2)"]
    )
    assert "| 1.11 | liger | liger | 9.00 |" in lines["loss"]
    assert "compile 20.00 [h 40.0]; quack: not installed" in lines["win (L2)"]
    assert "not measured" in lines["broken"] and "warpsmith: failed" in lines["broken"]
    columns = {line.count("|") for line in lines.values()}
    assert len(columns) == 1


def test_readme_part_has_the_numbers(result, tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    result.save(tmp_path / "results" / "toy.json")
    text = readme.section([tmp_path / "results" / "toy.json"])
    assert (
        "| bf16 win (L2) | 10.00 | 200 | 80 % | 20.00 | liger | 11.00 | 0.91 | none | 7.5 | 8.0 |"
        in text
    )
    assert (
        "| bf16 loss | 10.00 | 400 | 80 % | 20.00 | liger | 9.00 | 1.11 | liger | 7.5 | 8.0 |"
        in text
    )
    assert "broken" not in text and "![toy](results/toy.png)" in text
    new = readme.replaced(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter", [])
    assert new.startswith("before\n" + readme.BEGIN) and new.endswith(readme.END + "\nafter")
    assert "old" not in new
    with pytest.raises(ValueError, match="once each"):
        readme.replaced("no markers", [])


def test_readme_names_the_built_in_function_beside_host_times(result, tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    row = Row("F.norm", BUILTIN, OK, "", 0.0, timed(30, 30, 30), 6.5)
    result.cases[0].rows.append(row)
    result.save(tmp_path / "toy.json")
    text = readme.section([tmp_path / "toy.json"])
    assert "| slower than | host us | relu + empty_like | F.norm |" in text
    assert "| none | 7.5 | 8.0 | 6.5 |" in text
    assert "| liger | 7.5 | 8.0 |  |" in text


def test_readme_leaves_out_wins_and_no_losses(result, tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    result.cases[0].in_readme = result.cases[1].in_readme = False
    result.cases[2].rows[0] = result.cases[0].rows[0]
    assert [case.name for case in result.shown()] == ["loss", "broken"]
    result.save(tmp_path / "toy.json")
    text = readme.section([tmp_path / "toy.json"])
    assert "| bf16 loss | 10.00 |" in text and "bf16 win" not in text
    assert "2 of 3 shapes, none with a loss left out. All providers: [toy.md]" in text
    assert "win" in markdown.full(result)


def test_plot_is_written(result, tmp_path):
    plot.fractions(result, tmp_path / "toy.png")
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")


def test_diff_marks_what_is_further_apart(result):
    newer = report.Report(**{**vars(result), "cases": []})
    for case in result.cases:
        rows = [Row(r.provider, r.kind, r.status, timing=r.timing) for r in case.rows]
        newer.cases.append(CaseResult(**{**vars(case), "rows": rows}))
    newer.cases[0].rows[0].timing = timed(11.5, 11.5, 11.5)
    newer.cases[0].rows[1].timing = timed(17, 17, 17)
    newer.cases[0].rows[2].timing = timed(12, 12, 12)
    text = diff.compare(result, newer, 0.1)
    assert text.startswith("8 times in common, median ratio 1.000; 6 within 10 %, 2 further apart.")
    assert "| win | warpsmith | 10.00 | 11.50 | 1.15 | slower |" in text
    assert "| win | compile | 20.00 | 17.00 | 0.85 | faster |" in text
    assert "| win | liger | 11.00 | 12.00 | 1.09 |  |" in text
    with pytest.raises(ValueError, match="in common"):
        diff.compare(report.Report("toy", "cuda", {}), newer, 0.1)


def test_environment_of_the_cpu_names_cores_and_isa():
    values = environment.collect("cpu")
    assert values["cores"] >= 1 and values["threads"] == torch.get_num_threads()
    assert values["isa"] in ("baseline", "avx2", "avx512")
    assert values["libraries"]["torch"] == torch.__version__
    json.dumps(values)
    folder = environment.folder_name(values | {"device": "NVIDIA A100-SXM4 (80GB)"})
    assert folder == f"nvidia-a100-sxm4-80gb/{values['date']}-{values['commit']}"


def test_limits_are_those_of_the_gpu_that_torch_uses(monkeypatch):
    rows = [["GPU-a", "1980", "3201", "700.00"], ["GPU-b", "1410", "1593", "400.00"]]
    monkeypatch.setattr(environment.doctor, "nvidia_smi", lambda fields: rows)
    expected = {"clocks.max.sm": "1410", "clocks.max.mem": "1593", "power.limit": "400.00"}
    assert environment.limits("b") == expected
    assert environment.limits("c") == {}


# --- README.md and the command line --------------------------------------------------------------


def test_readme_and_results_agree():
    text = (ROOT / "README.md").read_text()
    assert readme.replaced(text, readme.published()) == text, "run `python -m benchmarks readme`"


def test_a_changed_number_in_the_readme_is_found():
    text = (ROOT / "README.md").read_text()
    number = re.compile(r"\| (\d)").search(text, text.index(readme.BEGIN)).start(1)
    changed = text[:number] + str((int(text[number]) + 1) % 10) + text[number + 1 :]
    assert readme.replaced(changed, readme.published()) == text


def test_published_results_have_their_tables_and_plots():
    paths = readme.published()
    assert paths
    for path in paths:
        result = report.read(path)
        assert path.with_suffix(".md").read_text() == markdown.full(result)
        assert path.with_suffix(".png").is_file()
        assert environment.folder_name(result.environment) == str(
            path.parent.relative_to(readme.RESULTS)
        )


def command(*arguments):
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    return process.returncode, process.stdout + process.stderr


def test_run_writes_results(tmp_path):
    status, output = command(
        "run", "attention", "--cpu", "--only", "few keys", "--results", str(tmp_path)
    )
    assert status == 0, output
    (folder,) = tmp_path.glob("*/*")
    assert {path.name for path in folder.iterdir()} == {
        f"attention-partial.{s}" for s in ("json", "md", "png")
    }
    result = report.read(folder / "attention-partial.json")
    assert result.build is None and result.ceilings["copy GB/s"] > 0
    assert result.environment["commit"] == environment.commit()
    assert "SDPA default" in (folder / "attention-partial.md").read_text()
    assert f"results: {folder}" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "img2gray", "--cpu", "--only", "8K"], "no case of img2gray contains '8K'"),
        (["run", "flux"], "invalid choice: 'flux'"),
        (["diff", "a.json", "b.json"], "No such file"),
        (["diff", "README.md", "README.md"], "README.md: no results of this program"),
        (["render", "kernels/img2gray/build.toml"], "build.toml: no results of this program"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    try:
        status = command_line.main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status != 0
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_gpu_is_not_measured(capsys):
    assert command_line.main(["run", "img2gray"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_make_bench_needs_a_kernel():
    process = subprocess.run(["make", "bench"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 2 and "usage: make bench KERNEL=" in process.stderr
