"""What the machine can do, measured in the same run: copies, mixes, matrix products, launches."""

from __future__ import annotations

import torch

from . import timing

MATRIX_SIZE = 8192


def copy_timers(
    num_bytes: int, sets: int, device: str
) -> dict[str, timing.GraphTimer | timing.CpuTimer]:
    """Copies that move `num_bytes`, half of them read, in as many sets as what they are compared with.
    On the GPU elementwise kernels: copies captured in a graph become memcpy nodes, which are slower.
    The faster one counts."""
    if device == "cpu":
        pairs = [_pair(num_bytes // 2, torch.uint8, device) for _ in range(sets)]
        return {"copy": timing.CpuTimer(lambda source, _: source.clone(), pairs)}
    timers = {}
    for dtype, function in ((torch.int32, torch.bitwise_not), (torch.bfloat16, torch.neg)):
        pairs = [_pair(num_bytes // 2, dtype, device) for _ in range(sets)]
        timers[f"copy {function.__name__}"] = timing.GraphTimer(
            lambda source, target, function=function: function(source, out=target), pairs
        )
    return timers


def _pair(num_bytes: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random, since constant data can run faster."""
    size = max(1, num_bytes // dtype.itemsize)
    source = torch.randint(1, 100, (size,), dtype=torch.uint8, device=device).to(dtype)
    return source, torch.empty_like(source)


def measure(device: str) -> dict[str, float]:
    """Rates in GB/s and TFLOP/s, the launch floor in microseconds."""
    if device == "cpu":
        size = 256 << 20
        copy = timing.interleave(copy_timers(size, 2, device), slices=3)["copy"]
        return {"copy GB/s": size / copy.us / 1e3}
    # Tensors of 1 GiB where the GPU has room for a dozen.
    large = min(1 << 30, torch.cuda.mem_get_info()[0] // 16 & ~0xFFF)
    copies = timing.interleave(copy_timers(2 * large, 2, device)).values()
    result = {"copy GB/s": 2 * large / min(copy.us for copy in copies) / 1e3}
    size = large // 2
    triples = [
        tuple(torch.randn(size, device=device).bfloat16() for _ in range(2))
        + (torch.empty(size, dtype=torch.bfloat16, device=device),)
        for _ in range(2)
    ]
    matrices = [
        tuple(torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).bfloat16() for _ in range(2))
        for _ in range(2)
    ]
    numbers = [(torch.zeros(32, device=device),) for _ in range(200)]
    timers = {
        "2 reads, 1 write": timing.GraphTimer(lambda a, b, out: torch.add(a, b, out=out), triples),
        "read": timing.GraphTimer(lambda a, b, out: a.sum(), triples),
        "matrix product": timing.GraphTimer(torch.matmul, matrices),
        "launch": timing.GraphTimer(lambda x: x.add_(1), numbers),
    }
    times = {name: time.us for name, time in timing.interleave(timers).items()}
    result["2 reads, 1 write GB/s"] = 3 * large / times["2 reads, 1 write"] / 1e3
    result["read GB/s"] = large / times["read"] / 1e3
    result["bf16 matrix TFLOP/s"] = 2 * MATRIX_SIZE**3 / times["matrix product"] / 1e6
    result["launch in a graph us"] = times["launch"]
    return result
