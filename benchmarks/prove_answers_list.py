"""Scripts of which it is known beforehand what holds: for `prove_answers.py`, written without a look at the tests' own.

Most break no promise, or one in a way that is easily missed: by what is drawn, late, or in a small gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """import collections, copy, math, os, random, time
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset, IterableDataset
import manyhosts as mh

random_ = torch.Generator().manual_seed(7)
X = torch.randn(48, 6, generator=random_)
Y = torch.randint(0, 3, (48,), generator=random_)
P = torch.randn(48, 6, generator=random_) + X
SETS = TensorDataset(X, Y)
adamw = lambda params: torch.optim.AdamW(params, lr=1e-2)
sgd = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)


def net(out=3, width=8):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, out))


def fit(model=net, data=SETS, batch=12, optimizer=adamw, how="20 epochs", given=None, **more):
    mh.Trainer(
        model=model, optimizer=optimizer, data=mh.Data(train=data, batch_size=batch, **(given or {})), **more
    ).fit(how)

"""


@dataclass(frozen=True)
class Script:
    """A script, and what is true of it."""

    text: str
    broken: tuple[str, ...] = ()
    """The promises that do not hold."""
    unsure: tuple[str, ...] = ()
    """Those of which an honest answer may be that they could not be tried, or for which either answer is right."""
    head: bool = True

    @property
    def code(self) -> str:
        """The whole script."""
        return HEAD + self.text if self.head else self.text


SCRIPTS = {
    "wrong: batch spread in a branch of tiny gradient, AdamW": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = net()
        s.side = nn.Linear(6, 4)

    def forward(s, x):
        return s.body(x), s.side(x)


def step(m, b):
    a, side = m(b[0])
    return 1e5 * F.cross_entropy(a, b[1]) + 1e-2 * side.var(0).sum().sqrt()


fit(M, step=step, weight="samples")
""",
        broken=("workers", "micro"),
    ),
    "wrong: spread over the batch of noise (constant draws hide it)": Script(
        """
def step(m, b):
    out = m(b[0])
    noise = torch.randn(len(out), 3)
    return F.cross_entropy(out, b[1]) + (noise.std(0, unbiased=False) * out.mean(0).abs()).sum()


fit(step=step, weight="samples")
""",
        broken=("workers", "micro"),
    ),
    "wrong: mixup of permuted rows, root of the mean": Script(
        """
def step(m, b):
    lam = torch.distributions.Beta(0.4, 0.4).sample()
    perm = torch.randperm(len(b[0]))
    out = m(lam * b[0] + (1 - lam) * b[0][perm])
    return (F.cross_entropy(out, b[1]) + 0.1).sqrt()


fit(step=step, weight="samples")
""",
        broken=("workers", "micro"),
        unsure=("workers", "micro"),
    ),
    "wrong: a batch term whose weight grows from 1e-6 ten-fold a step": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = net()
        s.register_buffer("beta", torch.tensor(1e-6))

    def forward(s, x):
        return s.body(x)


class Grow(mh.Callback):
    def after_step(self, moment):
        moment.model.beta.mul_(3).clamp_(max=1.0)


def step(m, b):
    out = m(b[0])
    return F.cross_entropy(out, b[1]) + m.beta * out.std(0).sum()


fit(M, step=step, weight="samples", callbacks=[Grow()])
""",
        broken=("workers", "micro"),
    ),
    "wrong: root mean square error": Script(
        """
def step(m, b):
    return torch.sqrt(F.mse_loss(m(b[0]), b[0][:, :3]) + 1e-6)


fit(step=step)
""",
        broken=("workers", "micro"),
    ),
    "wrong: worst half of the batch (hard examples)": Script(
        """
def step(m, b):
    each = F.cross_entropy(m(b[0]), b[1], reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


fit(step=step)
""",
        broken=("workers", "micro"),
    ),
    "wrong: Barlow twins of dropout views": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(6, 8)
        s.d = nn.Dropout(0.3)
        s.b = nn.Linear(8, 4)

    def forward(s, x):
        return s.b(s.d(torch.tanh(s.a(x))))


def step(m, b):
    one, two = m(b[0]), m(b[0])
    one, two = one - one.mean(0), two - two.mean(0)
    c = one.T @ two / len(one)
    return ((c - torch.eye(4)) ** 2).sum()


fit(M, step=step, weight="samples")
""",
        broken=("workers", "micro"),
    ),
    "wrong: CLIP of attention, one temperature": Script(
        """
class Clip(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        s.b = nn.Linear(6, 6)
        s.t = nn.Parameter(torch.tensor(1.0))

    def forward(s, x, p):
        return F.normalize(s.a(x[:, None].repeat(1, 3, 1)).mean(1), dim=1), F.normalize(s.b(p), dim=1)


def step(m, batch):
    one, two = m(*batch)
    sims = m.t.exp() * one @ two.T
    want = torch.arange(len(one))
    return (F.cross_entropy(sims, want) + F.cross_entropy(sims.T, want)) / 2


fit(Clip, TensorDataset(X, P), step=step)
""",
        broken=("workers", "micro"),
    ),
    "wrong: mean teacher averaged in step": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.student = net()
        s.teacher = copy.deepcopy(s.student).requires_grad_(False)

    def forward(s, x):
        return s.student(x)


def step(m, b):
    with torch.no_grad():
        for t, p in zip(m.teacher.parameters(), m.student.parameters()):
            t.lerp_(p, 0.2)
    out = m(b[0])
    return F.cross_entropy(out, b[1]) + F.mse_loss(out, m.teacher(b[0]))


fit(M, step=step)
""",
        broken=("micro",),
        unsure=("workers",),
    ),
    "wrong: running mean of losses in a deque weighs the loss": Script(
        """
recent = collections.deque(maxlen=4)


def step(m, b):
    loss = F.cross_entropy(m(b[0]), b[1])
    recent.append(loss.item())
    return loss / (sum(recent) / len(recent))


fit(step=step)
""",
        broken=("workers", "micro", "resume"),
    ),
    "wrong: counter of passes anneals a term": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = net()
        s.count = 0

    def forward(s, x):
        s.count += 1
        return s.body(x)


def step(m, b):
    out = m(b[0])
    return F.cross_entropy(out, b[1]) + min(1.0, m.count / 10) * (out**2).mean()


fit(M, step=step)
""",
        broken=("micro", "resume"),
        unsure=("workers",),
    ),
    "wrong: noise of the dataset's own NumPy generator": Script(
        """
class D(Dataset):
    def __init__(s):
        s.rng = np.random.default_rng(3)

    def __len__(s):
        return 48

    def __getitem__(s, i):
        return X[i] + torch.as_tensor(s.rng.normal(size=6), dtype=torch.float32), Y[i]


fit(data=D(), loss=nn.CrossEntropyLoss())
""",
        broken=("workers", "resume"),
        unsure=("micro",),
    ),
    "wrong: a listener shifts a weight on the leader": Script(
        """
class Shift:
    trainer = None

    def __call__(self, event):
        if type(event).__name__ == "StepDone":
            with torch.no_grad():
                Shift.model[0].bias.add_(1e-3)


def make():
    Shift.model = net()
    return Shift.model


fit(make, loss=nn.CrossEntropyLoss(), listeners=[Shift()])
""",
        broken=("workers", "ranks"),
        unsure=("resume", "samples"),
    ),
    "wrong: padded to the longest, padding counts": Script(
        """
class D(Dataset):
    def __len__(s):
        return 48

    def __getitem__(s, i):
        return X[i, : 2 + i % 5], Y[i]


def collate(items):
    xs, ys = zip(*items)
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.stack(ys)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(1, 5)
        s.b = nn.Linear(5, 3)

    def forward(s, x):
        return s.b(torch.tanh(s.a(x[..., None])).mean(1))


fit(M, D(), loss=nn.CrossEntropyLoss(), given={"collate": collate})
""",
        broken=("workers", "micro"),
    ),
    "wrong: noise seeded by rank": Script(
        """
noise = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))


def step(m, b):
    x = b[0] + 0.3 * torch.randn(b[0].shape, generator=noise)
    return F.cross_entropy(m(x), b[1])


fit(step=step)
""",
        broken=("workers", "micro", "resume"),
        unsure=("micro",),
    ),
    "wrong: an optimizer whose warmth is an attribute": Script(
        """
class Warm(torch.optim.SGD):
    warmth = 0.0

    def step(self, closure=None):
        self.warmth += 0.01
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1 + self.warmth)
        return super().step(closure)


fit(optimizer=lambda p: Warm(p, lr=0.05), loss=nn.CrossEntropyLoss())
""",
        broken=("resume",),
    ),
    "wrong: gradient hook that takes signs": Script(
        """
def make():
    m = net()
    m[0].weight.register_hook(torch.sign)
    return m


fit(make, loss=nn.CrossEntropyLoss())
""",
        broken=("workers", "micro"),
    ),
    "wrong: post-accumulate hook that clips each piece": Script(
        """
def clipped(p):
    p.grad.clamp_(-0.02, 0.02)


def make():
    m = net()
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(clipped)
    return m


fit(make, loss=nn.CrossEntropyLoss())
""",
        broken=("workers", "micro"),
    ),
    "wrong: own loop: a loss that is a sum": Script(
        """
run = mh.Run(models={"m": net}, optimizers={"m": adamw}, data=mh.Data(train=SETS, batch_size=12))


def step(run):
    run.backward(lambda b: F.cross_entropy(run.models["m"](b[0]), b[1], reduction="sum"))
    run.update()


run.fit(step, "20 epochs")
""",
        broken=("workers", "micro"),
    ),
    "wrong: own loop: contrastive in pieces": Script(
        """
run = mh.Run(models={"m": net}, optimizers={"m": adamw}, data=mh.Data(train=TensorDataset(X, P), batch_size=12))


def loss(b):
    one, two = (F.normalize(run.models["m"](each), dim=1) for each in b)
    return F.cross_entropy(4 * one @ two.T, torch.arange(len(one)))


def step(run):
    run.backward(loss)
    run.update()


run.fit(step, "20 epochs")
""",
        broken=("workers", "micro"),
    ),
    "wrong: own loop: a list of its own decides": Script(
        """
seen = []
run = mh.Run(models={"m": net}, optimizers={"m": sgd}, data=mh.Data(train=SETS, batch_size=12))


def step(run):
    seen.append(1)
    run.backward(lambda b: F.cross_entropy(run.models["m"](b[0]), b[1]) * (1 + 0.1 * len(seen)))
    run.update()


run.fit(step, "20 epochs")
""",
        broken=("resume",),
    ),
    "wrong: variational autoencoder, sums of reconstruction and KL": Script(
        """
class V(nn.Module):
    def __init__(s):
        super().__init__()
        s.e = nn.Linear(6, 4)
        s.d = nn.Linear(2, 6)

    def forward(s, x):
        mu, logvar = s.e(x).chunk(2, 1)
        return s.d(mu + torch.randn_like(mu) * (logvar / 2).exp()), mu, logvar


def step(m, b):
    out, mu, logvar = m(b[0])
    return F.mse_loss(out, b[0], reduction="sum") - 0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()


fit(V, step=step, weight="samples")
""",
        broken=("workers", "micro"),
    ),
    "wrong: a second loss over a mask of the batch": Script(
        """
def step(m, b):
    out = m(b[0])
    mask = b[0][:, 0] > 0.5
    second = (out[mask] ** 2).mean() if mask.any() else out.sum() * 0
    return F.cross_entropy(out, b[1]) + second


fit(step=step)
""",
        broken=("workers", "micro"),
    ),
    "wrong: samples cached as augmented first": Script(
        """
class D(Dataset):
    def __init__(s):
        s.kept = {}

    def __len__(s):
        return 48

    def __getitem__(s, i):
        if i not in s.kept:
            s.kept[i] = X[i] + 0.5 * torch.randn(6)
        return s.kept[i], Y[i]


fit(data=D(), loss=nn.CrossEntropyLoss())
""",
        broken=("resume",),
        unsure=("workers", "micro"),
    ),
    "wrong: BatchNorm called in chunks": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(6, 8)
        s.n = nn.BatchNorm1d(8)
        s.b = nn.Linear(8, 3)

    def forward(s, x):
        return s.b(torch.cat([s.n(each) for each in s.a(x).split(4)]).relu())


fit(M, loss=nn.CrossEntropyLoss())
""",
        broken=("workers",),
        unsure=("micro",),
    ),
    "wrong: soft F1 of multinomial negatives": Script(
        """
def step(m, b):
    out = m(b[0]).softmax(1)
    picked = torch.multinomial(torch.ones(3), 2)
    p = out[:, picked]
    want = F.one_hot(b[1], 3)[:, picked].float()
    return 1 - (2 * (p * want).sum() + 1) / (p.sum() + want.sum() + 1)


fit(step=step, weight="samples")
""",
        broken=("workers", "micro"),
        unsure=("workers", "micro"),
    ),
    "wrong: term from step 6 on: spread of the batch, by a buffer": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = net()
        s.register_buffer("n", torch.zeros(()))

    def forward(s, x):
        return s.body(x)


class Count(mh.Callback):
    def after_step(self, moment):
        moment.model.n.add_(1)


def step(m, b):
    out = m(b[0])
    loss = F.cross_entropy(out, b[1])
    return loss + out.std(0).sum() if m.n >= 6 else loss


fit(M, step=step, callbacks=[Count()])
""",
        broken=("workers", "micro"),
    ),
    "right: WGAN critic in Trainer": Script("""
def step(m, b):
    return m(b[1]).mean() - m(b[0]).mean()


fit(lambda: net(1), TensorDataset(X, P), step=step, optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3))
"""),
    "right: contrastive over the batch by over_batch": Script("""
run = mh.Run(models={"m": net}, optimizers={"m": adamw}, data=mh.Data(train=TensorDataset(X, P), batch_size=12))


def rows(b):
    return torch.cat([F.normalize(run.models["m"](each), dim=1) for each in b], 1)


def clip(r):
    return F.cross_entropy(4 * r[:, :3] @ r[:, 3:].T, torch.arange(len(r)))


def step(run):
    run.backward(rows, over_batch=clip)
    run.update()


run.fit(step, "20 epochs")
"""),
    "right: BERT masked words, -100, random weights, dropout": Script("""
from transformers import BertConfig, BertForMaskedLM

words = torch.randint(0, 30, (48, 8), generator=random_)
labels = torch.where(torch.rand(48, 8, generator=random_) < 0.3, words, -100)
labels[:, 2] = words[:, 2]


class D(Dataset):
    def __len__(s):
        return 48

    def __getitem__(s, i):
        return {"input_ids": words[i], "labels": labels[i]}


make = lambda: BertForMaskedLM(
    BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
)
fit(make, D(), step=lambda m, b: m(**b).loss)
"""),
    "right: GPT-2, -100 also at the first place, no dropout": Script("""
from transformers import GPT2Config, GPT2LMHeadModel

words = torch.randint(0, 30, (48, 8), generator=random_)
labels = torch.where(torch.rand(48, 8, generator=random_) < 0.5, words, -100)
labels[:, 3] = words[:, 3]


class D(Dataset):
    def __len__(s):
        return 48

    def __getitem__(s, i):
        return {"input_ids": words[i], "labels": labels[i]}


make = lambda: GPT2LMHeadModel(
    GPT2Config(
        vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
)
fit(make, D(), step=lambda m, b: m(**b).loss)
"""),
    "right: mean teacher in a callback, dropout in the student": Script("""
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.student = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        s.teacher = copy.deepcopy(s.student).requires_grad_(False)

    def forward(s, x):
        return s.student(x)


class Teach(mh.Callback):
    @torch.no_grad()
    def after_step(self, moment):
        for t, p in zip(moment.model.teacher.parameters(), moment.model.student.parameters()):
            t.lerp_(p, 0.1)


def step(m, b):
    out = m(b[0])
    return F.cross_entropy(out, b[1]) + F.mse_loss(out, m.teacher(b[0]))


fit(M, step=step, callbacks=[Teach()])
"""),
    "right: dice of each sample, autocast within": Script("""
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.b = net()

    def forward(s, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return s.b(x)


def dice(out, want):
    p = out.float().sigmoid()
    return (1 - 2 * (p * want).sum(1) / (p.sum(1) + want.sum(1) + 1)).mean()


fit(M, TensorDataset(X, (P[:, :3] > 0).float()), loss=dice)
"""),
    "right: packed LSTM of sequences of many lengths": Script("""
lengths = torch.randint(1, 6, (48,), generator=random_)


class D(Dataset):
    def __len__(s):
        return 48

    def __getitem__(s, i):
        return X[i, : lengths[i], None], Y[i]


def collate(items):
    xs, ys = zip(*items)
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.stack(ys)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.r = nn.LSTM(1, 5, batch_first=True, bidirectional=True)
        s.o = nn.Linear(10, 3)

    def forward(s, x, n):
        packed = nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        return s.o(s.r(packed)[1][0].permute(1, 0, 2).flatten(1))


fit(M, D(), step=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), given={"collate": collate})
"""),
    "right: RReLU": Script("""
fit(lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3)), loss=nn.CrossEntropyLoss())
"""),
    "right: two losses with counts of their own": Script("""
def step(m, b):
    out = m(b[0])
    mask = b[0][:, 0] > 0.5
    return {"loss": {"all": F.cross_entropy(out, b[1]), "some": (out[mask] ** 2).mean()}}


fit(step=step, weight=lambda b: {"all": len(b[0]), "some": int((b[0][:, 0] > 0.5).sum())})
"""),
    "right: Lookahead that keeps slow weights in its state": Script("""
class Lookahead(torch.optim.AdamW):
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                    state["n"] = torch.zeros(())
                state["n"] += 1
                if int(state["n"]) % 3 == 0:
                    state["slow"].lerp_(p.detach(), 0.5)
                    p.data.copy_(state["slow"])
        return loss


fit(optimizer=lambda p: Lookahead(p, lr=1e-2), loss=nn.CrossEntropyLoss())
"""),
    "right: Langevin noise in the optimizer": Script("""
class SGLD(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(1e-3 * torch.randn_like(p))


fit(optimizer=lambda p: SGLD(p, lr=0.05), loss=nn.CrossEntropyLoss())
"""),
    "right: order of its own, hard samples later": Script("""
hard = np.argsort(X.abs().sum(1).numpy())
fit(
    loss=nn.CrossEntropyLoss(),
    given={"order": lambda epoch: np.random.permutation(np.resize(hard[: 24 + 6 * epoch], 48))},
)
"""),
    "right: MinMaxMetric over validation, early stopping": Script("""
from torchmetrics import MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy

fit(
    loss=nn.CrossEntropyLoss(),
    metrics={"a": MinMaxMetric(MulticlassAccuracy(num_classes=3))},
    given={"validation": SETS},
    best=mh.Best("loss", mode="min"),
)
"""),
    "right: REINFORCE without data, six parts": Script(
        """
run = mh.Run(models={"m": lambda: net(2)}, optimizers={"m": adamw}, virtual_workers=6)


def play(_):
    x = torch.randn(4, 6)
    d = torch.distributions.Categorical(logits=run.models["m"](x))
    a = d.sample()
    return -(d.log_prob(a) * (a == (x[:, 0] > 0)).float()).mean()


def step(run):
    run.backward(play)
    run.update()


run.fit(step, "40 steps")
""",
        unsure=("micro",),
    ),
    "right: CTC, mean": Script("""
want = torch.randint(1, 3, (48, 2), generator=random_)
count = torch.randint(1, 3, (48,), generator=random_)


def step(m, b):
    out = m(b[0]).view(-1, 6, 3).log_softmax(2).permute(1, 0, 2)
    return F.ctc_loss(out, b[1], torch.full((len(b[0]),), 6), b[2])


fit(lambda: net(18), TensorDataset(X, want, count), step=step)
"""),
    "right: Gaussian likelihood, deque for pictures only": Script(
        """
seen = collections.deque(maxlen=3)


def step(m, b):
    mean, var = m(b[0]).split([1, 1], 1)
    seen.append(mean.detach().mean().item())
    return {"loss": F.gaussian_nll_loss(mean, b[1][:, :1], F.softplus(var) + 0.1), "mean": mean.mean()}


fit(lambda: net(2), TensorDataset(X, P), step=step)
""",
        unsure=("workers", "micro", "resume"),
    ),
    "right: a stream": Script("""
class Stream(IterableDataset):
    def __iter__(s):
        return ((X[i], Y[i]) for i in range(48))


fit(data=Stream(), loss=nn.CrossEntropyLoss())
"""),
    "right: own loop: GAN, two optimizers": Script(
        """
run = mh.Run(
    models={"g": lambda: nn.Linear(4, 6), "c": lambda: net(1)},
    optimizers={n: (lambda p: torch.optim.Adam(p, 1e-2)) for n in ("g", "c")},
    data=mh.Data(train=TensorDataset(X), batch_size=12),
    virtual_workers=6,
)


def critic(b):
    fake = run.models["g"](torch.randn(len(b[0]), 4)).detach()
    c = run.models["c"]
    return F.softplus(-c(b[0])).mean() + F.softplus(c(fake)).mean()


def fooled(b):
    return F.softplus(-run.models["c"](run.models["g"](torch.randn(len(b[0]), 4)))).mean()


def step(run):
    run.backward(critic, "c")
    run.update("c")
    if run.steps_done % 2 == 0:
        run.backward(fooled, "g")
        run.update("g", clip=1.0)


run.fit(step, "20 epochs")
""",
        unsure=("micro",),
    ),
    "right: own loop: tokens counted": Script("""
def loss(b):
    out = run.models["m"](b[0])
    mask = (b[0] > 0)[:, :3].float()
    return {"loss": (mask * (out - b[0][:, :3]) ** 2).sum() / mask.sum(), "count": mask.sum()}


run = mh.Run(models={"m": net}, optimizers={"m": adamw}, data=mh.Data(train=SETS, batch_size=12))


def step(run):
    run.backward(loss)
    run.update()


run.fit(step, "20 epochs")
"""),
    "right: last batch of 5, each worker uneven, mean weights given": Script("""
def step(m, b):
    w = b[0][:, 0].abs()
    return (w * F.cross_entropy(m(b[0]), b[1], reduction="none")).sum() / w.sum()


fit(data=TensorDataset(X[:41], Y[:41]), step=step, weight=lambda b: float(b[0][:, 0].abs().sum()))
"""),
    "right: spectral norm and weight norm": Script(
        """
fit(
    lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)),
    ),
    loss=nn.CrossEntropyLoss(),
)
""",
        broken=("micro",),
    ),
    "unknown: plain torchrun script": Script(
        """
import torch, os
import torch.distributed as dist
from torch import nn

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
m = nn.Linear(4, 1)
o = torch.optim.SGD(m.parameters(), lr=0.1)
x = torch.randn(64, 4)
world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
for i in range(30):
    o.zero_grad()
    b = x[rank::world]
    nn.functional.mse_loss(m(b), b.sum(1, keepdim=True)).backward()
    if world > 1:
        for p in m.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    o.step()
""",
        unsure=("workers", "micro", "resume", "samples"),
        head=False,
    ),
    "unknown: mixup over the piece by Beta and randperm": Script(
        """
def step(m, b):
    lam = float(np.random.beta(0.4, 0.4))
    perm = torch.randperm(len(b[0]))
    out = m(lam * b[0] + (1 - lam) * b[0][perm])
    return lam * F.cross_entropy(out, b[1]) + (1 - lam) * F.cross_entropy(out, b[1][perm])


fit(step=step)
""",
        unsure=("workers", "micro"),
    ),
    "unknown: the step ends by itself with an error in step 9": Script(
        """
class Stop(mh.Callback):
    n = 0

    def after_step(self, moment):
        Stop.n += 1
        if Stop.n == 9:
            raise RuntimeError("the licence server is away")


fit(loss=nn.CrossEntropyLoss(), callbacks=[Stop()])
""",
        unsure=("workers", "micro", "resume", "samples", "ranks"),
    ),
    "unknown: Gumbel choices and negatives drawn from the batch": Script(
        """
def step(m, b):
    out = m(b[0])
    hard = F.gumbel_softmax(out, hard=True)
    neg = b[0][torch.randint(0, len(b[0]), (len(b[0]),))]
    return F.cross_entropy(out, b[1]) + ((hard - m(neg)) ** 2).mean()


fit(step=step)
""",
        unsure=("workers", "micro"),
    ),
    "unknown: numbers by random.Random of the step's own, one per sample": Script(
        """
own = random.Random(4)


def step(m, b):
    s = torch.tensor([own.random() for _ in range(len(b[0]))])
    return (s * F.cross_entropy(m(b[0]), b[1], reduction="none")).mean()


fit(step=step)
""",
        broken=("workers", "resume"),
        unsure=("workers", "micro"),
    ),
    "unknown: NumPy drop path for each sample": Script(
        """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(6, 6)
        s.o = nn.Linear(6, 3)

    def forward(s, x):
        keep = torch.as_tensor(np.random.rand(len(x), 1) < 0.8, dtype=x.dtype)
        return s.o(x + keep * torch.tanh(s.a(x)))


fit(M, loss=nn.CrossEntropyLoss())
""",
        unsure=("workers", "micro"),
    ),
    "unknown: pipeline of three blocks": Script(
        """
make = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
fit(make, loss=nn.CrossEntropyLoss(), strategy="pipeline", micro_batch_size=3)
""",
        unsure=("workers", "micro", "resume", "samples", "ranks"),
    ),
    "unknown: collate that mixes rows (CutMix)": Script(
        """
def collate(items):
    x = torch.stack([i[0] for i in items])
    y = torch.stack([i[1] for i in items])
    perm = torch.randperm(len(x))
    k = random.randrange(1, 6)
    x = torch.cat([x[:, :k], x[perm][:, k:]], 1)
    w = k / 6
    return x, w * F.one_hot(y, 3).float() + (1 - w) * F.one_hot(y[perm], 3).float()


fit(loss=nn.CrossEntropyLoss(), given={"collate": collate})
""",
        unsure=("workers", "micro"),
    ),
    "unknown: a set that grows in a callback": Script(
        """
class D(Dataset):
    def __init__(s):
        s.n = 48

    def __len__(s):
        return s.n

    def __getitem__(s, i):
        return X[i % 48], Y[i % 48]


grown = D()


class Grow(mh.Callback):
    def after_epoch(self, moment):
        grown.n += 12


fit(data=grown, loss=nn.CrossEntropyLoss(), callbacks=[Grow()])
""",
        unsure=("workers", "micro", "resume", "samples", "ranks"),
    ),
    "unknown: SAM, two gradients in a step": Script(
        """
class SAM(torch.optim.SGD):
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        moved = []
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                e = 0.05 * p.grad / (p.grad.norm() + 1e-12)
                p.add_(e)
                moved.append((p, e))
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, e in moved:
                p.sub_(e)
        return super().step()


fit(optimizer=lambda p: SAM(p, lr=0.05), loss=nn.CrossEntropyLoss())
""",
        unsure=("workers", "micro", "resume", "samples", "ranks"),
    ),
    "unknown: weights of a process pool: os.urandom noise": Script(
        """
def step(m, b):
    n = torch.frombuffer(bytearray(os.urandom(6)), dtype=torch.uint8).float() / 255
    return F.cross_entropy(m(b[0] + 0.1 * n), b[1])


fit(step=step)
""",
        broken=("workers", "micro", "resume"),
        unsure=("workers", "micro"),
    ),
    "unknown: multinomial choice of samples of the batch": Script(
        """
def step(m, b):
    pick = torch.multinomial(torch.ones(len(b[0])), len(b[0]), replacement=True)
    return F.cross_entropy(m(b[0][pick]), b[1][pick])


fit(step=step)
""",
        unsure=("workers", "micro"),
    ),
}
