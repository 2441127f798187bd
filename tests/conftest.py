"""Tests are offline and single-threaded: tiny tensors gain nothing from more, and results do not
depend on the machine.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

import torch

torch.set_num_threads(1)
