"""For every test: one thread for PyTorch; its tensors are tiny, and threads that wait for a busy core cost tenfold."""

import torch

torch.set_num_threads(1)
