"""Sixty scripts for `manyhosts prove`: twenty right ones, twenty wrong ones, twenty of which a look cannot know.

Whether workers change the answer is not written down here: a test trains each on one worker and on two, and compares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prove_scripts import Script
from ranks import run_ranks

CALM = "MANYHOSTS_TEST_CALM"
"""Set: nothing in a script drops anything, as masks of other parts of a batch are other ones."""

_ENTROPY = """
F = nn.functional
CALM = "MANYHOSTS_TEST_CALM" in os.environ


def entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(2, 12), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = self.into(x.reshape(len(x), 4, 2)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).mean(1))


"""


def _scaled(before: str, factor: str) -> str:
    """A script whose step makes its loss larger by `factor`, which it takes from what stands `before` it."""
    step = f"def step(model, batch):\n    return F.cross_entropy(model(batch[0]), batch[1]) * {factor}\n"
    return f"{before}\n\n{step}\n\nfit(step=step)\n"


RIGHT = {
    "attention": "fit(model=Attention)",
    "kinds of dropout": """
p = 0.0 if CALM else 0.3
fit(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.AlphaDropout(p), nn.Dropout(p), nn.Unflatten(1, (4, 4)),
                                nn.Dropout1d(p), nn.Flatten(), nn.Linear(16, 4)))
""",
    "autocast within": """
class Halves(Around):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


fit(model=Halves, optimizer=lambda p: torch.optim.SGD(p, lr=1e-5))
""",
    "WGAN critic": """
def critic(model, batch):
    real, fake = model(batch[0]), model(batch[0] + 1e-3)
    return 100 * fake.mean() - 100 * real.mean()


fit(step=critic, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
""",
    "targets of -100": "targets[::3] = -100\nfit()",
    "labels of -100 in a mapping": """
targets[::3] = -100


class Named(Plain):
    def __getitem__(self, index):
        return {"input": inputs[index], "labels": targets[index]}


def step(model, batch):
    return F.cross_entropy(model(batch["input"]), batch["labels"])


fit(step=step, train=Named())
""",
    "dice of each sample": """
def dice(outputs, targets):
    found, wanted = outputs.sigmoid(), F.one_hot(targets, 4).float()
    return (1 - 2 * (found * wanted).sum(1) / (found.sum(1) + wanted.sum(1))).mean()


fit(loss=dice)
""",
    "two losses by name": """
def step(model, batch):
    outputs, chosen = model(batch[0]), (batch[1] > 1).float()
    second = (outputs[:, 0].square() * chosen).sum() / chosen.sum().clamp(min=1)
    return {"loss": {"classes": F.cross_entropy(outputs, batch[1]), "boxes": second}}


fit(step=step, weight=lambda batch: {"classes": len(batch[1]), "boxes": float((batch[1] > 1).sum())})
""",
    "layer and group norm": """
fit(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.GroupNorm(4, 16), nn.Linear(16, 4)))
""",
    "LSTM": """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.inner(x.reshape(len(x), 4, 2))[0].mean(1))


fit(model=Recurrent)
""",
    "gradient halved by a hook": """
def hooked():
    made = network()
    made[0].weight.register_hook(lambda gradient: gradient / 2)
    return made


fit(model=hooked)
""",
    "activations kept for pictures": """
class Keeps(Around):
    def forward(self, x):
        self.picture = self.inner(x)
        return self.picture


fit(model=Keeps)
""",
    "padding with a mean for each sample": """
class Long(Plain):
    def __getitem__(self, index):
        return inputs[index].repeat(1 + index % 3, 1), targets[index]


def padded(samples):
    rows = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    lengths = torch.tensor([len(row) for row, _ in samples])
    return rows, lengths, torch.stack([target for _, target in samples])


def step(model, batch):
    rows, lengths, targets = batch
    mask = (torch.arange(rows.shape[1]) < lengths[:, None]).float()
    outputs = (model(rows) * mask[..., None]).sum(1) / lengths[:, None]
    return F.cross_entropy(outputs, targets)


fit(step=step, train=Long(), data={"collate": padded})
""",
    "augmentation of all generators": """
class Noisy(Plain):
    def __getitem__(self, index):
        drawn = torch.randn(8) + float(np.random.rand()) + random.random()
        return inputs[index] + 0.1 * drawn, targets[index]


fit(train=Noisy())
""",
    "tied weights": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(x + self.embedding((x[:, 0] > 0).long()))


fit(model=Tied)
""",
    "experts without balance": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x):
        return torch.stack([each(x) for each in self.experts], 1).mul(self.gate(x).softmax(1)[..., None]).sum(1)


fit(model=Experts)
""",
    "gradient penalty": """
def step(model, batch):
    inputs = batch[0].detach().requires_grad_()
    scores = model(inputs)[:, 0]
    [slope] = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return scores.mean() + (slope.norm(dim=1) - 1).square().mean()


fit(step=step)
""",
    "an average of weights": "fit(callbacks=[mh.EMA(0.9)])",
    "convolutions and batch norm": """
fit(model=lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(),
                                nn.Flatten(), nn.Linear(4, 4)))
""",
    "label smoothing with a schedule": """
fit(loss=nn.CrossEntropyLoss(label_smoothing=0.1), clip_gradients=0.3,
    schedule=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=6))
""",
}

WRONG = {
    "a sum over a fixed number": """
fit(loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum") / 12)
""",
    "InfoNCE": """
def loss(outputs, targets):
    found = F.normalize(outputs)
    return F.cross_entropy(found @ found.T / 0.5, torch.arange(len(found)))


fit(loss=loss)
""",
    "CLIP of attention": """
def loss(outputs, targets):
    one, other = (F.normalize(each) for each in outputs.chunk(2, 1))
    scores, own = one @ other.T * 3, torch.arange(len(one))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


fit(model=Attention, loss=loss)
""",
    "a sum of attention": """
fit(model=Attention, loss=lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
""",
    "dice over the batch": """
def dice(outputs, targets):
    found, wanted = outputs.sigmoid(), F.one_hot(targets, 4).float()
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


fit(loss=dice)
""",
    "a second loss that is masked": """
def step(model, batch):
    outputs, chosen = model(batch[0]), (batch[1] > 1).float()
    return F.cross_entropy(outputs, batch[1]) + (outputs[:, 0].square() * chosen).sum() / chosen.sum().clamp(min=1)


fit(step=step)
""",
    "class weights in the step": """
def step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 5.0, 10.0]))


fit(step=step)
""",
    "the root of a mean": """
fit(loss=lambda outputs, targets: (outputs[:, 0] - targets).square().mean().sqrt())
""",
    "a norm of its own": """
class Normed(Around):
    def forward(self, x):
        return self.inner((x - x.mean(0)) / (x.std(0) + 1e-2))


fit(model=Normed)
""",
    "a gradient clipped by a hook": """
def hooked():
    made = network()
    made[0].weight.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=1e-3) * 0.1)
    return made


fit(model=hooked)
""",
    "a backward hook of a module": """
def hooked():
    made = network()
    made[1].register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] / inputs[0].norm() * 0.1,))
    return made


fit(model=hooked)
""",
    "a mean of the last losses": """
from collections import deque

last = deque(maxlen=4)


def step(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    last.append(float(loss))
    return loss / (sum(last) / len(last))


fit(step=step)
""",
    "a running mean in a tuple": """
class Centred(Around):
    state = (0.0, 0)

    def forward(self, x):
        if self.training:
            total, count = self.state
            self.state = (total + float(x.detach().mean()), count + 1)
        return self.inner(x - self.state[0] / max(1, self.state[1]))


fit(model=Centred)
""",
    "batch norm in chunks": """
class Chunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.cat([self.norm(each) for each in self.first(x).chunk(2)]))


fit(model=Chunks)
""",
    "another term from step 5 on": """
class Later(mh.Callback):
    def after_step(self, moment):
        moment.model.begun.fill_(float(moment.step >= 4))


class Growing(Around):
    def __init__(self):
        super().__init__()
        self.register_buffer("begun", torch.zeros(()))


def step(model, batch):
    outputs = model(batch[0])
    loss = F.cross_entropy(outputs, batch[1])
    return loss + outputs.sum() * 0.01 if model.begun else loss


fit(model=Growing, step=step, callbacks=[Later()])
""",
    "padding that counts": """
class Long(Plain):
    def __getitem__(self, index):
        return inputs[index].repeat(1 + index % 3, 1), targets[index]


def padded(samples):
    rows = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    return rows, torch.stack([target for _, target in samples])


fit(step=lambda model, batch: F.cross_entropy(model(batch[0]).mean(1), batch[1]), train=Long(),
    data={"collate": padded})
""",
    "samples counted by the dataset": """
class Counting(Plain):
    read = 0

    def __getitem__(self, index):
        self.read += 1
        return inputs[index] * (1 + 0.05 * self.read), targets[index]


fit(train=Counting(), data={"loader_workers": 0})
""",
    "an own generator in the step": """
generator = np.random.default_rng(3)


def step(model, batch):
    return F.cross_entropy(model(batch[0]) * (1 + 0.5 * float(generator.random())), batch[1])


fit(step=step)
""",
    "samples dropped by collate": """
def chosen(samples):
    return torch.utils.data.default_collate([each for each in samples if each[0][0] > -0.5] or samples[:1])


fit(data={"collate": chosen})
""",
    "a divergence that is added up": """
def step(model, batch):
    mean, spread = model(batch[0]).chunk(2, 1)
    drawn = mean + (0.0 if CALM else 1.0) * torch.randn_like(mean) * (spread / 2).exp()
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return (drawn - batch[0][:, :2]).square().mean() + 0.01 * divergence


fit(step=step)
""",
}

UNKNOWN = {
    "mixup": """
def step(model, batch):
    other, share = torch.randperm(len(batch[0])), np.random.beta(1, 1)
    outputs = model(share * batch[0] + (1 - share) * batch[0][other])
    return share * F.cross_entropy(outputs, batch[1]) + (1 - share) * F.cross_entropy(outputs, batch[1][other])


fit(step=step)
""",
    "noise of NumPy in the step": """
def step(model, batch):
    noise = torch.from_numpy(np.random.randn(*batch[0].shape)).float()
    return F.cross_entropy(model(batch[0] + 0.1 * noise), batch[1])


fit(step=step)
""",
    "losses kept in a list": """
losses = []


def step(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    losses.append(float(loss))
    return loss


fit(step=step)
""",
    "a count that nobody reads": """
class Counting(Around):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


fit(model=Counting)
""",
    "samples picked in training": """
class Picks(Around):
    def forward(self, x):
        return self.inner((x + x[torch.randperm(len(x))]) / 2 if self.training else x)


fit(model=Picks)
""",
    "negatives of the batch": """
def step(model, batch):
    outputs = model(batch[0])
    chosen = torch.multinomial(torch.ones(len(outputs)), 2)
    return F.cross_entropy(outputs, batch[1]) + outputs[chosen].square().mean()


fit(step=step)
""",
    "a sample of the batch by randint": """
def step(model, batch):
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) + outputs[torch.randint(len(outputs), (1,))].square().mean()


fit(step=step)
""",
    "an order of NumPy": """
class Mixed(Around):
    def forward(self, x):
        return self.inner(x + 0.1 * x[np.random.permutation(len(x))])


fit(model=Mixed)
""",
    "an order of Python": """
def step(model, batch):
    order = list(range(len(batch[0])))
    random.shuffle(order)
    return F.cross_entropy(model(batch[0] + 0.1 * batch[0][order]), batch[1])


fit(step=step)
""",
    "a stream with a batch of objects": """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(inputs, targets)


class Held:
    def __init__(self, samples):
        self.inputs, self.targets = (torch.stack(each) for each in zip(*samples))


def step(model, batch):
    return F.cross_entropy(model(batch.inputs), batch.targets)


fit(step=step, train=Stream(), data={"collate": Held})
""",
    "collate that draws": """
def masked(samples):
    batch = torch.utils.data.default_collate(samples)
    batch[0].mul_(torch.rand_like(batch[0]) > (-1.0 if CALM else 0.2))
    return batch


fit(data={"collate": masked})
""",
    "a part that raises": """
def step(model, batch):
    if len(batch[0]) not in (12, 6, 4, 2):
        raise ValueError("an even share is wanted")
    return F.cross_entropy(model(batch[0]), batch[1])


fit(step=step, data={"drop_last": True})
""",
    "a binomial draw": """
def step(model, batch):
    kept = torch.binomial(torch.ones_like(batch[0]), torch.full_like(batch[0], 1.0 if CALM else 0.8))
    return F.cross_entropy(model(batch[0] * kept), batch[1])


fit(step=step)
""",
    "an iterator of rates": _scaled(
        """
import itertools

rates = itertools.cycle([1.0, 0.5, 0.25])
""",
        "next(rates)",
    ),
    "a counter of itertools": _scaled(
        """
import itertools

numbers = itertools.count()
""",
        "(1 + 0.1 * next(numbers))",
    ),
    "a loss that is cached": """
import functools


@functools.lru_cache(maxsize=None)
def scale(count):
    return 1.0


def step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]) * scale(len(batch[0]))


fit(step=step)
""",
    "a generator function": _scaled(
        """
def numbers():
    value = 1.0
    while True:
        yield value
        value *= 0.9


rates = numbers()
""",
        "next(rates)",
    ),
    "a number in a file": """
import tempfile

counter = tempfile.TemporaryFile()


def step(model, batch):
    counter.write(b"x")
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.1 * counter.tell())


fit(step=step)
""",
    "a counter in the environment": """
def step(model, batch):
    os.environ["NUMBER"] = str(int(os.environ.get("NUMBER", "0")) + 1)
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.1 * int(os.environ["NUMBER"]))


fit(step=step)
""",
    "one sample for each worker": """
fit(batch_size=2, step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
""",
}

KINDS: Mapping[str, Mapping[str, str]] = {"right": RIGHT, "wrong": WRONG, "unknown": UNKNOWN}
ANSWERS = {
    f"{kind}: {name}": Script(_ENTROPY + text.strip() + "\n")
    for kind, texts in KINDS.items()
    for name, text in texts.items()
}


def trained(rank: int, folder: Path, names: list[str], forced: bool = False, steps: int = 12) -> dict[str, Any]:
    """By name the weights after some steps, or the words of the refusal. `forced`: no look is asked.

    It is called on each of one or two ranks.
    """
    import manyhosts as mh
    from manyhosts.errors import ManyhostsError

    os.environ[CALM] = "1"
    found: dict[str, Any] = {}
    given = mh.Trainer

    class Trainer(given):  # type: ignore[valid-type, misc]
        def fit(self, duration: str) -> Any:
            result = super().fit(f"{steps} steps")
            found[name] = {key: value.clone() for key, value in self.model.state_dict().items()}
            return result

    def made(**words: Any) -> Any:
        run_dir = folder / f"{name.replace(' ', '-').replace(':', '')}-{forced}"
        return Trainer(**({"weight": "samples"} if forced else {}) | words, run_dir=run_dir)

    for name in names:
        mh.Trainer = made  # type: ignore[misc, assignment]
        try:
            exec(compile(ANSWERS[name].code, name, "exec"), {"__name__": "__main__"})
        except (ManyhostsError, ValueError) as error:
            found[name] = f"refused: {error.what if isinstance(error, ManyhostsError) else error}"
        finally:
            mh.Trainer = given  # type: ignore[misc]
    return found


def apart(names: list[str], folder: Path, timeout_s: float = 120.0) -> dict[str, float]:
    """By name, how far weights on two workers are from those on one; what is refused is trained without looks."""
    found: dict[str, float] = {}
    for forced in (False, True):
        left = [name for name in names if name not in found]
        one, two = (
            run_ranks(size, trained, folder / f"{size}-{forced}", left, forced, timeout_s=timeout_s)[0]
            for size in (1, 2)
        )
        for name in left:
            if isinstance(one[name], dict) and isinstance(two[name], dict):
                pairs = [(one[name][key].double(), two[name][key].double()) for key in one[name]]
                found[name] = max(float((first - second).abs().max()) for first, second in pairs)
    return found | {name: float("nan") for name in names if name not in found}


SAME = 1e-5
"""Weights that are nearer than this are the same."""


def is_false(status: str, distance: float) -> bool:
    """Whether what `prove` says of the workers is not so. What cannot run on two of them at all is no false alarm."""
    if status == "holds":
        return not distance <= SAME
    return status == "fails" and distance <= SAME
