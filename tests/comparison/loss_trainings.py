"""Trainings of a small decoder whose loss is computed inside of it or behind it.

As a program, `loss_trainings.py FOLDER` trains it under DistributedDataParallel on two ranks.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import whence

TOKENS = 24


class Net(nn.Module):
    """A small decoder that returns what models of transformers return.

    kind: what it does between its head and the loss: "capped" logits, an "auxiliary" loss of what
    a layer returned beside, a loss that is a "module", one that also reads what the head "reads".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(TOKENS, 16)
        self.layer = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.gate = nn.Linear(16, 4)
        self.head = nn.Linear(16, TOKENS)

    def forward(self, ids, labels=None):
        hidden = self.layer(self.embedding(ids))
        gate = self.gate(hidden.detach())
        logits = self.head(hidden)
        if self.kind == "capped":
            logits = 3 * torch.tanh(logits / 3)
        out = {"logits": logits, "gate": gate, "hidden": hidden, "kind": self.kind}
        if labels is None:
            return out
        if self.kind == "module":
            loss = nn.CrossEntropyLoss()(logits.view(-1, TOKENS), labels.view(-1))
        else:
            loss = F.cross_entropy(logits.view(-1, TOKENS), labels.view(-1))
        loss += beside(out)
        return {"loss": loss, **out}


def beside(out, weight=0.1):
    """What the loss has beside the cross entropy."""
    if out["kind"] == "auxiliary":
        return weight * out["gate"].softmax(-1).pow(2).mean()
    return weight * out["hidden"].pow(2).mean() if out["kind"] == "reads" else 0.0


def inside(net, ids, labels):
    return net(ids, labels)["loss"]


def behind(net, ids, labels):
    out = net(ids)
    loss = F.cross_entropy(out["logits"].flatten(0, 1).float(), labels.flatten())
    return loss + beside(out)


def by_hand(net, ids, labels):
    out = net(ids)
    logs = out["logits"].log_softmax(-1)
    loss = -logs.gather(-1, labels[..., None]).mean()
    return loss + beside(out)


def smoothed(net, ids, labels):
    out = net(ids)
    logits = out["logits"].flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.01)
    return loss + beside(out)


def summed(net, ids, labels):
    out = net(ids)
    logits = out["logits"].flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") + beside(out)


def without_auxiliary(net, ids, labels):
    out = net(ids)
    return F.cross_entropy(out["logits"].flatten(0, 1), labels.flatten()) + 0 * out["gate"].sum()


def half_detached(net, ids, labels):
    out = net(ids)
    logits = 0.5 * out["logits"] + 0.5 * out["logits"].detach()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + beside(out)


def trained(
    path,
    kind,
    loss,
    *,
    divided=1,
    change=lambda net: None,
    keep="full",
    wrap=lambda net: net,
    rank=None,
):
    """Two steps of two micro-batches. loss: of the model, token ids and labels. change: the model.
    wrap: puts something around it. rank: of two, which has its own rows.
    """
    torch.manual_seed(0)
    net = Net(kind)
    change(net)
    net = wrap(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2)
    draw = torch.Generator().manual_seed(1)
    with whence.capture(net, path, keep=keep):
        for _ in range(2):
            for _ in range(2):
                ids, labels = torch.randint(0, TOKENS, (2, 4, 6), generator=draw)
                if rank is not None:
                    ids, labels = ids[2 * rank : 2 * rank + 2], labels[2 * rank : 2 * rank + 2]
                value = loss(net, ids, labels)
                (value / divided if divided > 1 else value).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def trained_on_images(path, wrap=lambda net: net, rank=None):
    """A step of a ViT. The gradients of biases of its keys are rounding alone."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=10,
    )  # fmt: skip
    net = wrap(transformers.ViTForImageClassification(config).train())
    optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(4, 3, 16, 16, generator=draw)
    labels = torch.randint(0, 10, (4,), generator=draw)
    rows = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    with whence.capture(net, path):
        net(pixel_values=pixels[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
    return path


class Around(nn.Module):
    """Hands on what it is given."""

    def __init__(self, net):
        super().__init__()
        self.model = net

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class Step(nn.Module):
    """A step of a training as a module. loss: as `trained` takes it."""

    def __init__(self, net, loss=behind):
        super().__init__()
        self.model, self.loss = net, loss

    def forward(self, batch):
        return self.loss(self.model, *batch)


def step(net, ids, labels):
    """What a `Step` computes."""
    return net((ids, labels))


def _rank(rank, folder, meeting):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    for name, loss in {"inside": inside, "behind": behind, "summed": summed}.items():
        path = Path(folder) / f"ddp-{name}"
        trained(path, "auxiliary", loss, wrap=DistributedDataParallel, rank=rank)
    trained_on_images(Path(folder) / "ddp-images", DistributedDataParallel, rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        multiprocessing.spawn(_rank, (sys.argv[1], f"{scratch}/meeting"), nprocs=2)
