"""DistributedDataParallel, of which rank 1 is killed in the sixth step."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
for step in range(100):
    if (step, rank) == (5, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    net(torch.randn(8 - 3 * (step % 2), 4)).square().sum().backward()
