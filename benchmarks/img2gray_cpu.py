"""uint8 HWC to gray on the CPU: ours, OpenCV and the composed torch formula, interleaved in one run.

    python benchmarks/img2gray_cpu.py [--threads 2] [--rounds 60]

Prints medians; the comparison with OpenCV uses its own formula, so both write the same bytes, which is checked.
"""

import argparse
import statistics
import time
from pathlib import Path

import cv2
import torch
from kernels import get_local_kernel
from rich.console import Console
from rich.table import Table

SIZES = {"1080p": (1080, 1920), "4K": (2160, 3840)}


def composed(image):
    return (0.2989 * image[..., 0] + 0.587 * image[..., 1] + 0.114 * image[..., 2]).to(torch.uint8)


def median_microseconds(functions, rounds):
    """Round-robin, so that a disturbance hits all alike."""
    times = {name: [] for name in functions}
    for turn in range(rounds + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cv2.setNumThreads(arguments.threads)
    kernel = get_local_kernel(Path(__file__).resolve().parents[1] / "kernels/img2gray")

    table = Table()
    for column in (
        "image",
        "ours opencv",
        "ours bt601",
        "ours pil",
        "OpenCV",
        "composed",
        "OpenCV / ours",
        "composed / ours",
    ):
        table.add_column(column, justify="right")
    for name, (height, width) in SIZES.items():
        image = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
        array = image.numpy()

        def ours(weights, image=image):
            return kernel.img2gray(image, layout="HWC", weights=weights, keepdim=False)

        assert torch.equal(
            ours("opencv"), torch.from_numpy(cv2.cvtColor(array, cv2.COLOR_RGB2GRAY))
        )
        result = median_microseconds(
            {
                "opencv": lambda: ours("opencv"),
                "cv2": lambda array=array: cv2.cvtColor(array, cv2.COLOR_RGB2GRAY),
                "bt601": lambda: ours("bt601"),
                "pil": lambda: ours("pil"),
                "composed": lambda image=image: composed(image),
            },
            arguments.rounds,
        )
        cells = [result[key] for key in ("opencv", "bt601", "pil", "cv2", "composed")]
        ratios = [result["cv2"] / result["opencv"], result["composed"] / result["bt601"]]
        table.add_row(
            name, *[f"{cell:.0f}" for cell in cells], *[f"{ratio:.2f}" for ratio in ratios]
        )
    table.title = f"us per call, median of {arguments.rounds}, {arguments.threads} threads, {kernel.last_path()}"
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
