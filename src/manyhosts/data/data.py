"""What a person says about the data: the datasets, and how many samples stand behind one step."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal

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
from manyhosts.data.fetch import Collate
from manyhosts.errors import ConfigError, DataError


class Data:
    """Training, validation and test set, ordinary datasets of PyTorch, and how they are read.

    Args:
        train: what `fit` trains on; map-style, or an `IterableDataset`.
        validation: what `validate` and `fit` evaluate; map-style.
        test: what `test` evaluates; map-style.
        batch_size: samples behind one optimizer step, over all workers.
        batch_size_per_worker: the other way: samples per worker, so that the batch grows with the workers.
        evaluation_batch_size: most samples in one forward pass of an evaluation; as in training where it is not given.
        loader_workers: processes per worker that fetch samples ahead; 0 fetches in the worker itself, `"auto"`
            times the first batches and starts as many as are needed.
        shuffle: whether each epoch has a new order.
        drop_last: leave out the last batch of an epoch where it is smaller than the others.
        collate: makes a batch of a list of samples; PyTorch's `default_collate` where it is not given.
    """

    @answers("mh.Data", OF_DATA)
    def __init__(  # noqa: PLR0913  # the user's whole vocabulary for data, by name only
        self,
        train: Dataset[Any] | None = None,
        *,
        validation: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        batch_size: int | None = None,
        batch_size_per_worker: int | None = None,
        evaluation_batch_size: int | None = None,
        loader_workers: int | Literal["auto"] = 0,
        shuffle: bool = True,
        drop_last: bool = False,
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
        for name, dataset in (("train", train), ("validation", validation), ("test", test)):
            if dataset is not None:
                check_dataset(name, dataset, where=f"mh.Data({name}=…)", is_stream_fine=name == "train")


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


def _lost_with_loader(loader: DataLoader[Any]) -> str:
    """What `loader` does beyond its dataset, with what to write for it here; nothing where it does no more."""
    sampler, found = getattr(loader, "sampler", None), ""
    batches = getattr(loader, "batch_sampler", None)
    own = batches if batches is not None and type(batches) is not BatchSampler else sampler
    if not isinstance(own, SequentialSampler | RandomSampler | DistributedSampler | type(None)):
        kind = type(own).__name__
        found = (
            f". Its {kind} would be lost with that: {SAMPLER}"
            if not isinstance(loader.dataset, IterableDataset)
            else ""
        )
    if isinstance(sampler, SequentialSampler) and not found:
        found = ". It does not shuffle, and mh.Data does: shuffle=False keeps the order"
    if loader.collate_fn is not default_collate:
        found += ". Give its collate_fn, too: mh.Data(collate=…)"
    return found


def check_dataset(name: str, dataset: Dataset[Any], *, where: str, is_stream_fine: bool) -> None:
    """See that `dataset`, the `name` set, can be read on any number of workers.

    Raises:
        ConfigError: it is no dataset, or a stream where samples must have numbers.
        DataError: it has no samples.
    """
    if isinstance(dataset, DataLoader):
        kept = _lost_with_loader(dataset)
        raise ConfigError(
            f"the {name} set is a DataLoader, whose order and batches would depend on the number of workers",
            where=where,
            fix=f"give its dataset: mh.Data({name}=loader.dataset, batch_size={dataset.batch_size or 64}){kept}"
            if where.startswith("mh.Data")
            else f"give its dataset: loader.dataset{kept}",
        )
    _see_that_no_several(name, dataset, where=where)
    if isinstance(dataset, IterableDataset):
        if not is_stream_fine:
            raise ConfigError(
                f"the {name} set is a stream, but an evaluation must know how many samples there are",
                where=where,
                fix="give a dataset with __len__ and __getitem__; list(stream) makes one",
            )
        return
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise ConfigError(
            f"the {name} set is a {type(dataset).__name__}, which has no __getitem__ and __len__",
            where=where,
            fix="give a torch.utils.data.Dataset",
        )
    if len(dataset) == 0:
        raise DataError(
            f"the {name} set has 0 samples",
            where=where,
            fix="check the path or the filter that it was made with",
        )
