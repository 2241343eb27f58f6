"""The arithmetic of each compression against a plain reference, between workers that are threads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from links import ThreadLink, on_links
from torch import Tensor

from manyhosts.communication.compression.codecs import BLOCK, Bf16Codec, Fp16Codec, Int8Codec
from manyhosts.communication.compression.exchange import Chunk, Compression, worth_it
from manyhosts.communication.compression.powersgd import PowerSGD
from manyhosts.communication.compression.table import COMPRESSIONS
from manyhosts.communication.compression.topk import largest
from manyhosts.config.strategies import DDP
from manyhosts.errors import ConfigError

NAMES = ["bf16", "fp16", "int8", "powersgd", "topk"]
SHAPES = [torch.Size((12, 7)), torch.Size((5, 3, 2)), torch.Size((40, 40))]


def make(name: str, **options: object) -> Compression:
    return COMPRESSIONS.load(name)(DDP(compression=name, powersgd_rank=2, topk_fraction=0.1, **options))


def gradients(rank: int, *, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(1000 * seed + rank)
    count = sum(math.prod(shape) for shape in SHAPES)
    return (scale * torch.randn(count, generator=source)).to(dtype)


def exchanged(name: str, workers: int, **options: object) -> list[tuple[Tensor, Tensor]]:
    """What each worker received, and what of its own values is in it."""

    def work(link: ThreadLink) -> tuple[Tensor, Tensor]:
        values = gradients(link.rank, **options)
        chunk = Chunk(values, SHAPES, [3, 4, 5])
        sent = make(name)(chunk, link)
        return values, values.clone() if sent is None else sent

    return on_links(workers, work)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_sum_of_what_was_sent_is_what_every_worker_received(name: str, workers: int) -> None:
    answers = exchanged(name, workers)
    for received, _ in answers:
        assert torch.equal(received, answers[0][0]), "the same bits on every worker"
    total = sum(sent.double() for _, sent in answers)
    torch.testing.assert_close(answers[0][0].double(), total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "error"), [("bf16", 2**-8), ("fp16", 2**-11), ("int8", 2 / 127)])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_narrow_numbers_are_near_the_exact_sum(name: str, error: float, workers: int, scale: float) -> None:
    [received, _], *_ = exchanged(name, workers, scale=scale)
    exact = sum(gradients(rank, scale=scale) for rank in range(workers))
    largest_value = max(float(gradients(rank, scale=scale).abs().max()) for rank in range(workers))
    assert float((received - exact).abs().max()) <= error * workers * 2 * largest_value
    assert float((received - exact).norm() / exact.norm()) <= error


def test_fp16_does_not_overflow_where_a_plain_cast_would() -> None:
    values = torch.tensor([[1e6, -3e7, 5.0, 0.0]])
    back = Fp16Codec().decode(Fp16Codec().encode(values), values)
    torch.testing.assert_close(back, values, rtol=2**-11, atol=0)


def test_scales_of_fp16_are_exact_powers_of_two() -> None:
    exponents = torch.arange(-100, 101, dtype=torch.float32)
    assert [math.frexp(float(value))[0] for value in torch.exp2(exponents)] == [0.5] * 201


@pytest.mark.parametrize("codec", [Bf16Codec(), Fp16Codec(), Int8Codec()], ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_number_that_is_none_arrives_as_one(codec: object, poison: float) -> None:
    values = torch.ones(2, BLOCK)
    values[1, 7] = poison
    back = codec.decode(codec.encode(values), values)  # type: ignore[attr-defined]
    assert not back[1].isfinite().all()
    assert back[0].isfinite().all()


def test_int8_rounds_each_block_by_its_own_largest_number() -> None:
    values = torch.cat([torch.linspace(-1, 1, BLOCK), 1e-6 * torch.linspace(-1, 1, BLOCK)])[None]
    back = Int8Codec().decode(Int8Codec().encode(values), values)
    for block in (slice(0, BLOCK), slice(BLOCK, 2 * BLOCK)):
        scale = float(values[0, block].abs().max()) / 127
        expected = torch.round(values[0, block] / scale) * scale
        torch.testing.assert_close(back[0, block], expected, rtol=1e-5, atol=1e-12)


def test_int8_sends_about_a_quarter_of_the_bytes() -> None:
    values = torch.randn(1, 100 * BLOCK)
    assert 4 * values.numel() / Int8Codec().encode(values).numel() > 3.9


@settings(max_examples=30)
@given(count=st.integers(1, 100_000), wanted=st.floats(0.0001, 1.0), seed=st.integers(0, 9), flat=st.booleans())
def test_largest_numbers_are_those_that_sorting_finds(count: int, wanted: float, seed: int, flat: bool) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    values = values.round() if flat else values  # many equal numbers
    k = max(1, round(wanted * count))
    found = largest(values, k)
    assert len(set(found.tolist())) == k
    assert torch.equal(values[found].abs().sort().values, values.abs().sort().values[-k:])


def test_powersgd_sends_a_matrix_of_its_rank_exactly() -> None:
    shape = torch.Size((30, 20))
    source = torch.Generator().manual_seed(5)
    thin = [torch.randn(30, 2, generator=source) for _ in range(2)]
    wide = torch.randn(2, 20, generator=source)  # the same row space on both workers, so the sum has rank 2 as well

    def work(link: ThreadLink) -> Tensor:
        values = (thin[link.rank] @ wide).view(-1)
        PowerSGD(DDP(powersgd_rank=2))(Chunk(values, [shape], [0]), link)
        return values

    for received in on_links(2, work):
        torch.testing.assert_close(received.view(shape), (thin[0] + thin[1]) @ wide, rtol=1e-4, atol=1e-4)


def test_powersgd_comes_nearer_to_the_best_low_rank_sum_step_by_step() -> None:
    """Power iteration over steps of the same gradient finds what a singular value decomposition finds."""
    shape = torch.Size((30, 20))
    both = [torch.randn(30, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    exact = both[0] + both[1]
    u, s, vt = torch.linalg.svd(exact)
    best = (exact - u[:, :2] * s[:2] @ vt[:2]).norm()

    def work(link: ThreadLink) -> list[float]:
        compression = PowerSGD(DDP(powersgd_rank=2))
        found = []
        for _ in range(60):
            values = both[link.rank].clone().view(-1)
            compression(Chunk(values, [shape], [0]), link)
            found.append(float((values.view(shape) - exact).norm() / best))
        return found

    for distances in on_links(2, work):
        assert distances[0] > distances[-1]
        assert distances[-1] == pytest.approx(1, rel=0.01)


def test_powersgd_does_not_remember_an_overflow() -> None:
    def work(link: ThreadLink) -> tuple[bool, bool]:
        compression = PowerSGD(DDP(powersgd_rank=2))
        shape = torch.Size((8, 8))
        first = torch.full((64,), float("inf") if link.rank else 1.0)
        compression(Chunk(first, [shape], [0]), link)
        second = torch.randn(64)
        compression(Chunk(second, [shape], [0]), link)
        return bool(first.isfinite().all()), bool(second.isfinite().all())

    assert on_links(2, work) == [(False, True)] * 2


def test_small_tensors_and_those_without_rows_are_not_worth_it() -> None:
    bias, weight = torch.nn.Parameter(torch.zeros(5000)), torch.nn.Parameter(torch.zeros(100, 50))
    assert not worth_it(make("powersgd"), bias, above=1024)
    assert worth_it(make("powersgd"), weight, above=1024)
    assert worth_it(make("int8"), bias, above=1024)
    assert not worth_it(make("int8"), bias, above=5001)


def test_unknown_compression_names_the_near_one() -> None:
    with pytest.raises(ConfigError) as error:
        DDP(compression="int9")
    assert "'int8'" in error.value.fix
    assert "powersgd" in error.value.fix


@pytest.mark.parametrize(
    "wrong", [{"powersgd_rank": 0}, {"topk_fraction": 0.0}, {"topk_fraction": 1.5}, {"compression_warmup": -1}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as error:
        DDP(**wrong)
    assert next(iter(wrong)) in error.value.where
