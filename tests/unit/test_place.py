"""A worker reads its place from torchrun's variables, or says which are missing."""

from __future__ import annotations

import pytest

from manyhands.cluster.place import Place
from manyhands.errors import ConfigError

FULL = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "digits",
}


def test_process_started_by_hand_is_alone() -> None:
    assert Place.from_environment({"PATH": "/bin"}) == Place(rank=0, size=1)


def test_every_variable_of_torchrun_is_read() -> None:
    assert Place.from_environment(FULL) == Place(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node_rank=1,
        head_address="node-0",
        head_port=29500,
        restart=2,
        run_id="digits",
    )


def test_local_ranks_may_be_left_out_on_one_host() -> None:
    few = {key: FULL[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    place = Place.from_environment(few)
    assert (place.local_rank, place.local_size, place.node_rank) == (5, 8, 0)


def test_one_of_one_needs_no_address() -> None:
    assert Place.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) == Place()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing} is not set") as refused:
        Place.from_environment({key: value for key, value in FULL.items() if key != missing})
    assert "manyhands run" in refused.value.fix


@pytest.mark.parametrize("variables", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}])
def test_rank_outside_the_world_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"RANK is .*, but WORLD_SIZE is"):
        Place.from_environment(FULL | variables)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"])
def test_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'first', which is no number"):
        Place.from_environment(FULL | {name: "first"})
