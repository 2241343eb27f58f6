"""A stream: an `IterableDataset` has no length and no index, so the run is measured in steps."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import manyhosts as mh

WEIGHTS = torch.tensor([1.0, -2.0, 3.0, 0.5])


class Measurements(IterableDataset):
    """Endless noisy measurements of one linear law.

    Every worker reads the entire stream and keeps its part. A stream that can skip what others read offers
    `shard(index, count)`, and one that can continue where it was offers `state_dict()` and `load_state_dict(state)`.
    """

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            inputs = torch.randn(4, generator=generator)
            noise = 0.1 * torch.randn(1, generator=generator)
            yield inputs, (inputs @ WEIGHTS).reshape(1) + noise


known = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))

trainer = mh.Trainer(
    model=lambda: nn.Linear(4, 1),  # made under the seed of the run, so that two runs are equal
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    data=mh.Data(
        train=Measurements(),
        validation=TensorDataset(known, (known @ WEIGHTS).reshape(-1, 1)),
        batch_size=32,
    ),
    validate_every="100 steps",
)
trainer.fit("200 steps")
mh.print("learned:", [round(value, 2) for value in trainer.model.weight.flatten().tolist()], "true:", WEIGHTS.tolist())
