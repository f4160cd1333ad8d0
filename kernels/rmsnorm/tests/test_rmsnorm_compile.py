"""torch.library and torch.compile: schemas, fakes, no graph breaks, no recompiles, CUDA graphs."""

import pytest
import torch
from rmsnorm_cases import (
    DTYPES,
    PAIRS,
    ROUNDINGS,
    name,
    normals,
    pair_name,
    same_bytes,
    strided_copy,
    weights,
)
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = [
    "rms_norm",
    "rms_norm_train",
    "rms_norm_out",
    "fused_add_rms_norm",
    "fused_add_rms_norm_train",
    "fused_add_rms_norm_",
    "rms_norm_backward",
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Compiled code is kept by source line, for all devices and tests together."""
    torch._dynamo.reset()


def op(kernel, call):
    return getattr(kernel._ops.ops, call).default


def samples():
    x = normals((2, 3, 5, 16))
    return {
        "dense": x,
        "transposed": x.transpose(1, 2),
        "channels_last": x.to(memory_format=torch.channels_last),
        "cut": x[..., 1:].half(),
        "expanded": x[:, :1].expand(2, 3, 5, 16).bfloat16(),
        "one_dim": x[0, 0, 0],
        "empty": x[:0],
        "no_columns": x[..., :0],
    }


def calls_of(kernel, x, rounding):
    """Every op on that x."""
    weight, residual = weights(x.shape[-1]).to(x.device), torch.randn_like(x)
    bias = torch.randn_like(weight)
    options = (weight, 1e-5, rounding, 0.5, bias)
    y, rstd = op(kernel, "rms_norm_train")(x, *options)
    dense = torch.randn_like(x, memory_format=torch.contiguous_format)
    calls = {
        "rms_norm": (x, *options),
        "rms_norm_train": (x, *options),
        "rms_norm_out": (x, torch.empty_like(y), *options),
        "fused_add_rms_norm": (x, residual, *options),
        "fused_add_rms_norm_train": (x, residual, *options),
        "fused_add_rms_norm_": (dense, residual, *options),
        "rms_norm_backward": (torch.randn_like(y), x, rstd, weight, 0.5, True, True, residual),
    }
    if y.dtype != x.dtype:
        del calls["fused_add_rms_norm_"]
    return calls


@pytest.mark.parametrize("sample, rounding", [("transposed", 0), ("cut", 1)])
def test_opcheck(kernel, device, sample, rounding):
    x = strided_copy(samples()[sample], device)
    for call, arguments in calls_of(kernel, x, rounding).items():
        if call.endswith("_train"):
            arguments = [
                argument.clone().requires_grad_()
                if isinstance(argument, torch.Tensor)
                else argument
                for argument in arguments
            ]
        torch.library.opcheck(op(kernel, call), tuple(arguments))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("sample", samples())
@pytest.mark.parametrize("rounding", range(3))
def test_opcheck_of_schemas_and_fakes(kernel, device, sample, rounding):
    x = strided_copy(samples()[sample], device)
    for call, arguments in calls_of(kernel, x, rounding).items():
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(op(kernel, call), arguments, test_utils=utils)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_all_07_compiles_without_graph_breaks(kernel, device, rounding):
    """Everything there is in one graph, what writes included, forward and backward."""

    def pipeline(x, residual, weight, buffer):
        y = kernel.rms_norm(x * 2, weight, 1e-5, rounding=rounding)
        z, total = kernel.fused_add_rms_norm(y, residual, weight, rounding=rounding)
        with torch.no_grad():
            kernel.rms_norm(x.detach(), weight, rounding=rounding, out=buffer)
            first, second = x.detach() + 1, residual.detach() + 1
            kernel.fused_add_rms_norm_(first, second, weight, rounding=rounding)
        return z * total, buffer + first, second

    leaves = [normals((4, 3, 24)), normals((4, 3, 24), seed=1), weights(24)]
    runs = []
    for function in (pipeline, torch.compile(pipeline, fullgraph=True, backend="aot_eager")):
        tensors = [strided_copy(leaf, device).requires_grad_() for leaf in leaves]
        buffer = torch.zeros(4, 3, 24, device=device)
        results = function(*tensors, buffer)
        results[0].square().sum().backward()
        runs.append([*results, buffer, *(tensor.grad for tensor in tensors)])
    for eager, compiled in zip(*runs):
        assert same_bytes(eager, compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_compiles_with_inductor(kernel, device, dtype):
    def block(x, weight):
        y, total = kernel.fused_add_rms_norm(x.transpose(1, 2), x.transpose(1, 2), weight)
        return y * 2, total

    runs = []
    for function in (block, torch.compile(block, fullgraph=True)):
        x = normals((2, 5, 3, 32), dtype).to(device).clone().requires_grad_()
        weight = weights(32).to(device).requires_grad_()
        y, total = function(x, weight)
        torch.autograd.backward([y, total], [torch.ones_like(y), torch.ones_like(total)])
        runs.append((y, total, x.grad, weight.grad))
    for eager, compiled in zip(*runs):
        torch.testing.assert_close(
            eager, compiled, rtol=2.0**-8 if dtype.itemsize == 2 else 1e-6, atol=1e-6
        )
    assert runs[0][0].stride() == runs[1][0].stride()


def test_no_recompiles_for_new_row_counts(kernel, device):
    counter = CompileCounterWithBackend("aot_eager")
    weight = weights(64).to(device).requires_grad_()

    def block(x):
        y, total = kernel.fused_add_rms_norm(kernel.rms_norm(x, weight), x, weight)
        return y + total

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    for rows in (2, 3, 17, 64, 1000):
        x = normals((rows, 5, 64)).to(device)
        assert same_bytes(compiled(x), block(x))
        counts.add(counter.frame_count)
    assert len(counts) == 1


def test_dynamic_hidden_size(kernel, device):
    counter = CompileCounter()
    compiled = torch.compile(kernel.rms_norm, fullgraph=True, dynamic=True, backend=counter)
    for rows, hidden in ((2, 8), (5, 64), (3, 1001)):
        x, weight = normals((rows, hidden)).to(device), weights(hidden).to(device)
        assert same_bytes(compiled(x, weight), kernel.rms_norm(x, weight))
    assert counter.frame_count == 1


def test_eps_and_offset_may_change_between_compiled_calls(kernel, device):
    x = normals((3, 64)).to(device)
    weight = weights(64).to(device)
    for dynamic in (None, True):
        compiled = torch.compile(
            lambda x, eps, offset: kernel.rms_norm(x, weight, eps, weight_offset=offset),
            fullgraph=True,
            dynamic=dynamic,
            backend="aot_eager",
        )
        for eps, offset in ((1e-6, 1.0), (1e-3, 0.5), (0.25, 0.0)):
            expected = kernel.rms_norm(x, weight, eps, weight_offset=offset)
            assert same_bytes(compiled(x, eps, offset), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_all_08_fakes_have_the_strides_of_the_kernel(kernel, device, pair, rounding):
    def described(*tensors):
        # Without elements, fakes of torch.empty_like have other strides than torch.empty_like.
        return [
            (t.shape, t.stride() if t.numel() > 0 else None, t.dtype, t.device.type)
            for t in tensors
        ]

    for sample in samples().values():
        x = strided_copy(sample, device).to(pair[0])
        weight = weights(x.shape[-1], pair[1]).to(device)
        calls = {
            "rms_norm": (x, weight, 1e-6, ROUNDINGS.index(rounding)),
            "rms_norm_train": (x, weight, 1e-6, ROUNDINGS.index(rounding)),
            "fused_add_rms_norm": (x, x, weight, 1e-6, ROUNDINGS.index(rounding)),
            "fused_add_rms_norm_train": (x, x, weight, 1e-6, ROUNDINGS.index(rounding)),
        }
        _, rstd = op(kernel, "rms_norm_train")(*calls["rms_norm_train"])
        dy = kernel.rms_norm(x, weight, rounding=rounding)
        calls["rms_norm_backward"] = (dy, x, rstd, weight, 0.0, True, False, x)
        for call, arguments in calls.items():
            real = op(kernel, call)(*arguments)
            with FakeTensorMode() as mode:
                fake = op(kernel, call)(
                    *(
                        mode.from_tensor(argument)
                        if isinstance(argument, torch.Tensor)
                        else argument
                        for argument in arguments
                    )
                )
            real, fake = (r if isinstance(r, tuple) else (r,) for r in (real, fake))
            assert described(*real) == described(*fake), call


def test_fakes_refuse_what_the_kernel_refuses(kernel):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight = meta(4, 64), meta(64)
    for call, words in (
        (lambda: kernel.rms_norm(meta(4, 64, dtype=torch.float64)), "x: dtype"),
        (lambda: kernel.rms_norm(meta()), "x: .*dim"),
        (lambda: kernel.rms_norm(x, meta(32)), r"weight: must have shape \[64\], got \[32\]"),
        (lambda: kernel.rms_norm(x, meta(64, dtype=torch.int32)), "weight: dtype"),
        (lambda: kernel.rms_norm(x, weight, bias=meta(32)), r"bias: must have shape \[64\]"),
        (lambda: kernel.rms_norm(x, weight, bias=meta(64, dtype=torch.half)), "bias: .*dtype"),
        (lambda: kernel.rms_norm(x, bias=weight), "bias: .*weight"),
        (lambda: kernel.rms_norm(x, out=meta(4, 32)), r"out: must have shape \[4, 64\]"),
        (lambda: kernel.rms_norm(x, out=meta(4, 64, dtype=torch.half)), "out: must have dtype"),
        (lambda: kernel.fused_add_rms_norm(x, meta(4, 32)), "residual: must have shape"),
        (lambda: kernel.fused_add_rms_norm(x, meta(4, 64, dtype=torch.half)), "residual: .*dtype"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    half = meta(4, 64, dtype=torch.half)
    assert kernel.rms_norm(half, weight).dtype == torch.half
    assert kernel.rms_norm(half, weight, rounding="input_dtype").dtype == torch.float32
    assert kernel.rms_norm(half.t()).stride() == half.t().stride()


def test_all_09_mutation_is_in_the_schema_and_nothing_is_returned(kernel):
    written = {"rms_norm_out": ["out"], "fused_add_rms_norm_": ["x", "residual"]}
    for call in OPS:
        schema = op(kernel, call)._schema
        marked = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info and argument.alias_info.is_write
        ]
        assert marked == written.get(call, [])
        if call in written:
            assert list(schema.returns) == []
        else:
            assert not any(value.alias_info for value in (*schema.arguments, *schema.returns))
            assert len(schema.returns) > 0


def test_all_09_writes_keep_their_order_under_compile(kernel, device):
    """Reads before and after the writes of one graph see what eager mode shows."""

    def block(x, residual, out):
        before = x + residual
        kernel.fused_add_rms_norm_(x, residual)
        between = x * residual
        kernel.rms_norm(x, out=out)
        kernel.rms_norm(out[:2].clone(), out=out[2:])
        kernel.fused_add_rms_norm_(x[:2], residual[2:])
        return before, between, x + residual, out * 1

    runs = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        tensors = [normals((4, 32), seed=seed).to(device).clone() for seed in range(3)]
        runs.append([*function(*tensors), *tensors])
    for eager, compiled in zip(*runs):
        assert same_bytes(eager, compiled)


def test_all_10_one_fake_and_one_kernel_per_device(kernel):
    for call in OPS:
        table = torch._C._dispatch_dump(kernel._ops.add_op_namespace_prefix(call)).splitlines()
        fakes = [line for line in table if line.startswith("Meta")]
        assert len(fakes) == 1 and "library.py" in fakes[0]
        assert len([line for line in table if line.startswith("CPU")]) == 1
        assert not [line for line in table if line.startswith("Composite")]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_an_exported_program_runs_and_trains(kernel, device, dtype):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(weights(32))

        def forward(self, x):
            y, total = kernel.fused_add_rms_norm(kernel.rms_norm(x, self.weight), x, self.weight)
            return y * total

    block = Block().to(device)
    x = normals((4, 32), dtype).to(device)
    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: rows},)).module()
    wider = normals((9, 32), dtype, seed=1).to(device)
    assert same_bytes(program(wider), block(wider))
    gradients = []
    for module in (block, program):
        leaf = wider.clone().requires_grad_()
        module(leaf).float().square().sum().backward()
        gradients.append([leaf.grad, *(parameter.grad for parameter in module.parameters())])
    assert len(gradients[0]) == len(gradients[1]) == 2
    for eager, exported in zip(*gradients):
        torch.testing.assert_close(exported, eager, rtol=2.0**-7, atol=1e-5)


def test_compiled_second_derivative_is_refused_or_right(kernel, device):
    x = normals((3, 32)).to(device).requires_grad_()
    compiled = torch.compile(lambda x: kernel.rms_norm(x).square().sum(), backend="aot_eager")
    with pytest.raises(RuntimeError, match="derivative|double backward"):
        (gradient,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        gradient.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("hidden", [64, 1000, 4096, 20000])
def test_all_02_cuda_graph_replays_with_new_input(kernel, dtype, hidden):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x, residual = (torch.empty(33, hidden, dtype=dtype, device="cuda") for _ in range(2))
    weight = weights(hidden).cuda().requires_grad_()
    leaf, dy = x.clone().requires_grad_(), torch.empty_like(x)
    out, first, second = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)

    def run():
        with torch.no_grad():
            kernel.rms_norm(x, weight, out=out)
            results = kernel.fused_add_rms_norm(x, residual, weight)
            first.copy_(x)
            second.copy_(residual)
            kernel.fused_add_rms_norm_(first, second, weight)
            leaf.copy_(x)
        gradients = torch.autograd.grad(kernel.rms_norm(leaf, weight), [leaf, weight], dy)
        return [*results, out, first, second, *gradients]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        for index, tensor in enumerate((x, residual, dy)):
            tensor.copy_(normals(x.shape, dtype, 3 * seed + index))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        for tensor, expected in zip(replayed, run()):
            assert same_bytes(tensor, expected)
