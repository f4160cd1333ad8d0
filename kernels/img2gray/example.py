"""A photograph to grayscale three ways, bit for bit as the libraries do it. Writes gray.png (or the path given).

Needs pillow, opencv-python-headless and scikit-image, which brings the photograph.
"""

import sys
from pathlib import Path

import cv2
import numpy as np
import torch
from kernels import get_local_kernel
from PIL import Image
from skimage.data import astronaut


def torchvision_formula(image: np.ndarray) -> np.ndarray:
    """fp32 fma(B, .114, fma(G, .587, R * .2989)), truncated: products of bytes are exact in float64."""
    red, green, blue = (image[..., channel].astype(np.float64) for channel in range(3))
    weights = np.array([0.2989, 0.587, 0.114], np.float32).astype(np.float64)
    gray = (red * weights[0]).astype(np.float32)
    for channel, weight in ((green, weights[1]), (blue, weights[2])):
        gray = (channel * weight + gray).astype(np.float32)
    return gray.astype(np.uint8)


def main(path: str) -> None:
    kernel = get_local_kernel(Path(__file__).parent)
    photograph = astronaut()
    image = torch.from_numpy(photograph)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    libraries = {
        "pil": np.asarray(Image.fromarray(photograph).convert("L")),
        "opencv": cv2.cvtColor(photograph, cv2.COLOR_RGB2GRAY),
        "bt601": torchvision_formula(photograph),
    }
    for weights, expected in libraries.items():
        gray = kernel.img2gray(image.to(device), layout="HWC", weights=weights, keepdim=False)
        different = int((gray.cpu().numpy() != expected).sum())
        print(
            f"{weights:8} {tuple(gray.shape)} on {device}: {different} of {gray.numel()} pixels differ"
        )
        if different:
            raise SystemExit(f"{weights}: not bit-equal")
    Image.fromarray(gray.cpu().numpy()).save(path)
    print(f"ran {kernel.last_path()}; wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gray.png")
