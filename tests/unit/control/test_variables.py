"""Defaults that a worker's environment gets."""

from __future__ import annotations

from manyhosts.control import variables


def test_cores_are_shared_out_between_the_workers_of_a_host() -> None:
    threads = [variables.of_host({}, cores=8, workers=n)["OMP_NUM_THREADS"] for n in (1, 2, 3, 8, 20)]
    assert threads == ["8", "4", "2", "1", "1"]


def test_what_the_user_has_set_stays() -> None:
    present = {"OMP_NUM_THREADS": "3", "TORCH_SHOW_CPP_STACKTRACES": "1"}
    assert not variables.of_host(present, cores=8, workers=2).keys() & present.keys()


def test_sets_of_strings_have_one_order_unless_the_user_wants_another() -> None:
    assert variables.of_host({}, cores=1, workers=1)["PYTHONHASHSEED"] == "0"
    assert "PYTHONHASHSEED" not in variables.of_host({"PYTHONHASHSEED": "random"}, cores=1, workers=1)


def test_interface_that_the_user_has_chosen_stays() -> None:
    assert variables.of_one_machine({"GLOO_SOCKET_IFNAME": "eth7"}) == {}
