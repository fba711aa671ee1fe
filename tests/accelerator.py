"""Where kernels of a GPU run in tests. Without a GPU triton interprets them, if this is imported before triton is."""

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
