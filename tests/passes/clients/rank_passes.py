"""Passes that differ between ranks, without a process group: ``rank_passes.py HOW``. Rank 1 alone has some of a sigmoid; HOW: what becomes of a
rank."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

rank, how = int(os.environ["RANK"]), sys.argv[1]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
for rows in (8, 8 - 3 * rank):  # one size on rank 0, another one besides on rank 1
    net(torch.randn(rows, 4)).square().sum().backward()
if rank == 1:
    for rows in (6, 4):
        net(torch.randn(rows, 4)).sigmoid().sum().backward()
if how == f"kill {rank}":
    os.kill(os.getpid(), signal.SIGKILL)
if how == f"raise {rank}":
    raise ValueError("of this rank's own")
if how.startswith("kill"):
    time.sleep(1)
    raise RuntimeError("the other one is gone")  # as a process group says
