"""What a person says about the data: the datasets, and how many samples a step has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from os import PathLike
from typing import Any, Literal, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from manyhosts.config.arguments import OF_DATA, SAMPLER, answers
from manyhosts.data.drawing import checked
from manyhosts.data.fetch import Collate
from manyhosts.data.own_order import OrderOf
from manyhosts.errors import ConfigError, DataError


class Data:
    """Training, validation and test set, ordinary datasets of PyTorch, and how they are read.

    Args:
        train: what `fit` trains on; map-style, or an `IterableDataset`.
        validation: what `validate` and `fit` evaluate; map-style. Several by name, `{"clean": …, "noisy": …}`: each is
            evaluated, and values are called `clean/loss`, `noisy/accuracy`.
        test: what `test` evaluates, likewise.
        batch_size: samples of one optimizer step, over all workers.
        batch_size_per_worker: the other way: samples per worker, so that the batch grows with the workers.
        evaluation_batch_size: samples in one forward pass of an evaluation, as in a loader with that batch size; where
            it is not given, `micro_batch_size`, or else the entire `batch_size`; fewer, but not below 32, where a set
            has fewer than 16 such batches.
        loader_workers: processes per worker that fetch samples ahead; 0 fetches in the worker itself, `"auto"`
            times the first batches and starts as many as are needed.
        shuffle: whether each epoch has a new order.
        drop_last: leave out the last batch of an epoch where it is smaller than the others.
        weights: how often each sample of `train` is drawn, compared with the others: an epoch then has as many samples
            as `train`, drawn with repeats. `mh.balanced(labels)`: every class equally often.
        order: `order(epoch)` gives the numbers of the samples of that epoch, in order, as many as `train` has: a
            sampler of your own, or a curriculum. Every worker calls it, and it depends on nothing but the epoch.
        collate: makes a batch of a list of samples; PyTorch's `default_collate` where it is not given.
    """

    @answers("mh.Data", OF_DATA)
    def __init__(  # noqa: PLR0913  # the user's entire vocabulary for data, by name only
        self,
        train: Dataset[Any] | None = None,
        *,
        validation: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None,
        test: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None,
        batch_size: int | None = None,
        batch_size_per_worker: int | None = None,
        evaluation_batch_size: int | None = None,
        loader_workers: int | Literal["auto"] = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        weights: Sequence[float] | Any | None = None,
        order: OrderOf | None = None,
        collate: Collate | None = None,
    ) -> None:
        self.train = train
        self.validation = validation
        self.test = test
        self.batch_size = batch_size
        self.batch_size_per_worker = batch_size_per_worker
        self.evaluation_batch_size = evaluation_batch_size
        self.loader_workers = loader_workers
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.collate = collate
        if is_several(train):
            given = ", ".join(map(str, train))  # type: ignore[call-overload]
            raise ConfigError(
                f"the train set is a dict of {given or 'nothing'}, and training has one set",
                where="mh.Data(train=…)",
                fix="give one of them, or torch.utils.data.ConcatDataset([first, second])",
            )
        for name in ("validation", "test"):
            _check_names(name, getattr(self, name))
        for name, dataset in self.sets().items():
            check_dataset(name, dataset, where=f"mh.Data({name}=…)", is_stream_fine=name == "train")

        self.order = order
        length = 0 if weights is None and order is None else self._length("weights" if order is None else "order")
        self.weights = None if weights is None else checked(weights, length)
        if order is not None and (weights is not None or not callable(order)):
            raise ConfigError(
                "weights and order both say which samples an epoch has"
                if weights is not None
                else "order is no function",
                where="mh.Data(order=…)",
                fix="give one of the two; order=lambda epoch: the numbers of its samples",
            )

    def _length(self, name: str) -> int:
        """How many samples can be drawn by what is called `name`."""
        train: object = self.train
        if isinstance(train, IterableDataset) or not isinstance(train, Sized) or not self.shuffle:
            raise ConfigError(
                f"samples are drawn by {name}, and there is no training set whose samples have numbers"
                if self.shuffle
                else f"shuffle=False keeps the order of the dataset, and {name} says another",
                where=f"mh.Data({name}=…)",
                fix=f"leave {name} out, or give a map-style dataset and leave shuffle out",
            )
        return len(train)

    def sets(self) -> dict[str, Dataset[Any]]:
        """Every set that was given, by `train`, `validation` and `test`; one of several as `validation/clean`."""
        found: dict[str, Dataset[Any]] = {}
        for name in ("train", "validation", "test"):
            given = getattr(self, name)
            if is_several(given):
                found |= {f"{name}/{key}": each for key, each in given.items()}
            elif given is not None:
                found[name] = given
        return found


def is_several(given: object) -> bool:
    """Whether datasets were given by name. A dict from other keys than texts to samples is a dataset."""
    return (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)) or (
        isinstance(given, dict) and isinstance(next(iter(given.values())), Dataset | DataLoader)
    )


def loss_of_first(validation: object) -> str:
    """What the loss of a validation is called: of several sets that of the first."""
    assert not is_several(validation) or isinstance(validation, Mapping), "is_several() has looked"
    return f"{next(iter(validation))}/loss" if is_several(validation) else "loss"  # type: ignore[call-overload]


def _check_names(name: str, given: object) -> None:
    """Raise ConfigError for several sets without any, or with a name that values could not be called by."""
    if not is_several(given):
        return
    assert isinstance(given, Mapping), "is_several() has looked"
    named_wrong = [key for key in given if not isinstance(key, str) or not key or "/" in key]
    if wrong := named_wrong or ([] if given else ["{}"]):
        raise ConfigError(
            f"{wrong[0]!r} is no name of a {name} set" if given else f"there is no {name} set in an empty dict",
            where=f"mh.Data({name}=…)",
            fix=f'write {name}={{"clean": first, "noisy": second}}: names are texts without /',
        )


def _see_that_no_several(name: str, given: object, *, where: str) -> None:
    """Raise ConfigError for a list of datasets, each of which would be taken for a sample."""
    if not isinstance(given, (list, tuple)) or not given:
        return
    if isinstance(given[0], DataLoader):
        kind, parts = "DataLoaders", "[each.dataset for each in …]"
    elif isinstance(given[0], Dataset):
        kind, parts = "datasets", "[…]"
    else:
        return
    raise ConfigError(
        f"the {name} set is a {type(given).__name__} of {kind}, not of samples",
        where=where,
        fix=f"give one dataset: torch.utils.data.ConcatDataset({parts})",
    )


def _see_samples(name: str, given: object, *, where: str) -> None:
    """Raise ConfigError for a path, whose letters, and for a tuple of columns, each of which would be taken for one."""
    if isinstance(given, str | bytes | PathLike):
        fix = "give a dataset that reads it, such as torchvision.datasets.ImageFolder(path)"
    elif isinstance(given, tuple) and given and all(hasattr(each, "shape") for each in given):
        fix = f"inputs and targets of all samples: {name}=TensorDataset(inputs, targets); a list is one of samples"
    else:
        return
    kind = type(given).__name__
    raise ConfigError(f"the {name} set is a {kind}, and not one of samples", where=where, fix=fix)


_SUBSET = "give the samples that it chooses: torch.utils.data.Subset(dataset, indices)"


def _lost_with_loader(loader: DataLoader[Any], *, is_train: bool) -> str:
    """What `loader` does beyond its dataset, with what to write for it here; nothing where it does no more.

    Held-out samples are not shuffled, whatever a loader did.
    """
    sampler, found = getattr(loader, "sampler", None), ""
    batches = getattr(loader, "batch_sampler", None)
    own = batches if batches is not None and type(batches) is not BatchSampler else sampler
    draws = isinstance(own, RandomSampler) and (own.replacement or own._num_samples is not None)
    if draws or not isinstance(own, SequentialSampler | RandomSampler | DistributedSampler | type(None)):
        kind = type(own).__name__
        found = (
            f". Its {kind} would be lost with that: {SAMPLER if is_train else _SUBSET}"
            if not isinstance(loader.dataset, IterableDataset)
            else ""
        )
    if is_train and isinstance(sampler, SequentialSampler) and not found:
        found = ". It does not shuffle, and mh.Data does: shuffle=False keeps the order"
    if loader.collate_fn is not default_collate:
        found += ". Give its collate_fn, too: mh.Data(collate=…)"
    return found


def _also(loader: DataLoader[Any], name: str) -> str:
    """What else is to be written for a loader of the training set."""
    drops = ", drop_last=True" * (loader.drop_last and name == "train")
    return drops + (f", loader_workers={loader.num_workers}" if loader.num_workers else "")


def reads_in_shards(train: object) -> bool:
    """Whether the training set is a stream of which each worker reads a shard of its own."""
    return isinstance(train, IterableDataset) and hasattr(train, "shard")


def check_dataset(name: str, dataset: Dataset[Any], *, where: str, is_stream_fine: bool) -> None:
    """See that `dataset`, the `name` set, can be read on any number of workers.

    Raises:
        ConfigError: it is no dataset, or a stream where samples must have numbers.
        DataError: it has no samples.
    """
    if isinstance(dataset, DataLoader):
        size = "batch_size" if name == "train" else "evaluation_batch_size"
        several, _, one = name.partition("/")
        given = f"{several}={{{one!r}: loader.dataset, …}}" if one else f"{name}=loader.dataset"
        of_each = name == "train" and getattr(dataset.sampler, "num_replicas", 1) > 1
        given = f"mh.Data({given}, {size}{'_per_worker' * of_each}={dataset.batch_size or 64}{_also(dataset, name)})"
        raise ConfigError(
            f"the {name} set is a DataLoader, whose order and batches would depend on the number of workers",
            where=where,
            fix=f"give its dataset: {given if where.startswith('mh.Data') else 'loader.dataset'}"
            + _lost_with_loader(dataset, is_train=name == "train"),
        )
    _see_that_no_several(name, dataset, where=where)
    _see_samples(name, dataset, where=where)
    if isinstance(dataset, IterableDataset):
        if not is_stream_fine:
            raise ConfigError(
                f"the {name} set is a stream, but an evaluation must know how many samples there are",
                where=where,
                fix="give a dataset with __len__ and __getitem__; list(stream) makes one",
            )
        return
    if lacking := [each for each in ("__getitem__", "__len__") if not hasattr(dataset, each)]:
        raise ConfigError(
            f"the {name} set is a {type(dataset).__name__}, which has no {' and no '.join(lacking)}",
            where=where,
            fix="give a torch.utils.data.Dataset",
        )
    try:
        count = len(cast(Sized, dataset))
    except Exception as cause:
        raise DataError(
            f"the {name} set cannot say how many samples it has: {type(cause).__name__}: {cause}",
            where=where,
            fix=f"let {type(dataset).__name__}.__len__ return that number, an integer from 0 on",
        ) from cause
    if count == 0:
        raise DataError(
            f"the {name} set has 0 samples",
            where=where,
            fix="check the path or the filter that it was made with",
        )
