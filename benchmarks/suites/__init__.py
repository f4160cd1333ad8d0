"""One module per kernel: `cases(device)` gives its cases."""

NAMES = ("img2gray", "rmsnorm", "attention")
