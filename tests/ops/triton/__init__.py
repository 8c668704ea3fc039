"""Laws of the Triton kernels, on a GPU or in Triton's interpreter."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
