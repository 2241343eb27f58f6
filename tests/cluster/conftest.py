"""Hosts for tests, and the rule that a test leaves them as they were."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from containers import users_folder, weights_here
from testbed import SCRIPTS, still_there, traces, traces_here

from manyhosts.lab import Lab, lab
from manyhosts.lab.lab import why_not

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs hosts: skipped, with the reason, where there can be none."""
    reason = why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("cluster")
            item.add_marker(pytest.mark.xdist_group("cluster"))  # one by one: each sees what others leave
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"{reason.what}: {reason.fix}"))


@pytest.fixture(scope="module")
def four() -> Iterator[Lab]:
    """Four hosts on 1 gbit, for tests that leave them as they are."""
    with lab(4, shown=(SCRIPTS,)) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def short_training(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights that the short training of `users_folder` comes to on this machine."""
    return weights_here(users_folder(tmp_path_factory.mktemp("here")))


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Makes hosts for one test, which may ruin them."""
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(lab(*args, shown=(SCRIPTS,), **more))


@pytest.fixture(autouse=True)
def leaves_hosts_as_they_were(request: pytest.FixtureRequest) -> Iterator[None]:
    """No process, port or file is left on a host of `four`; no interface, namespace or lab on this machine."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@cluster")
    assert alone, "these tests see each other's hosts: run them with --dist loadgroup"
    hosts = list(request.getfixturevalue("four")) if "four" in request.fixturenames else []
    before, machine = {host.name: traces(host) for host in hosts}, traces_here()
    yield
    left = [f"on this machine: {trace}" for trace in sorted(traces_here() - machine)]
    for host in hosts:
        left += [f"on {host.name}: {trace}" for trace in still_there(host, before[host.name])]
    assert not left, "left behind: " + "; ".join(left)
