"""An ordinary training script that does not mention aot-backward in its code. Run it directly, or record and replay it:

aot-backward record -o bw.pt2 -- examples/replay/train.py
aot-backward replay bw.pt2 -- examples/replay/train.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

torch.manual_seed(0)
images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
images = images.float().div(16).reshape(-1, 1, 8, 8)
train, test = slice(0, 1500), slice(1500, None)

net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 10)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
for _ in range(options.epochs):
    net.train()
    order = torch.randperm(1500)
    for rows in order.split(64):  # the last batch is smaller
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images[train][rows]), labels[train][rows])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
    schedule.step()
net.eval()
with torch.no_grad():
    accuracy = (net(images[test]).argmax(1) == labels[test]).float().mean()
print(f"loss {loss.item():.4f}, test accuracy {100 * accuracy:.1f} %")
