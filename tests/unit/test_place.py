"""A worker reads its place from torchrun's variables, or says which are missing."""

from __future__ import annotations

import pytest

from manyhosts.cluster.place import Place
from manyhosts.errors import ConfigError

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
    assert "manyhosts run" in refused.value.fix


@pytest.mark.parametrize("variables", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}])
def test_rank_outside_the_world_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"RANK is .*, but WORLD_SIZE is"):
        Place.from_environment(FULL | variables)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"])
def test_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'first', which is no number"):
        Place.from_environment(FULL | {name: "first"})


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "632946689",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_place_under_mpirun_on_one_host() -> None:
    place = Place.from_environment(OPEN_MPI)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 3, 4)
    assert place.head_address == "127.0.0.1"


def test_all_ranks_of_one_mpirun_meet_at_one_port_and_those_of_another_elsewhere() -> None:
    first = Place.from_environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"})
    other = Place.from_environment({**OPEN_MPI, "PMIX_NAMESPACE": "632946690"})
    assert first.head_port == Place.from_environment(OPEN_MPI).head_port != other.head_port
    assert 1024 < first.head_port < 32768


def test_mpirun_on_several_hosts_without_an_address_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        Place.from_environment({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert "manyhosts run --on mpi" in caught.value.fix


def test_mpirun_on_several_hosts_meets_at_the_address_that_is_given() -> None:
    given = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    place = Place.from_environment({**OPEN_MPI, **given})
    assert (place.head_address, place.head_port, place.node_rank) == ("node-0", 29500, 1)


def test_place_under_srun_is_where_the_step_begins() -> None:
    place = Place.from_environment(SRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.node_rank) == (5, 6, 1, 2, 2)
    assert place.head_address == "gpu07"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[3,7-9]x,m1", "n3x"), ("rack-1-n[08]", "rack-1-n08")],
)
def test_first_host_of_what_slurm_writes(nodes: str, first: str) -> None:
    assert Place.from_environment({**SRUN, "SLURM_STEP_NODELIST": nodes}).head_address == first


def test_script_in_a_batch_file_is_alone_though_slurm_has_set_its_variables() -> None:
    batch = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "4"}
    assert Place.from_environment(batch) == Place()


def test_torchruns_variables_come_before_those_of_the_engine_below() -> None:
    assert Place.from_environment({**FULL, **OPEN_MPI, **SRUN}) == Place.from_environment(FULL)
