"""Where workers meet: those of a Trainer through the channel of their agents; a store listens when one asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run

pytestmark = pytest.mark.multiprocess

TRAINS = """
    import os, socket
    import torch, torch.distributed as dist
    from torch.utils.data import TensorDataset
    import manyhosts as mh

    def listens():
        with socket.socket() as asking:
            return asking.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) == 0

    before = listens()
    trainer = mh.Trainer(
        model=torch.nn.Linear(2, 1), loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=mh.Data(train=TensorDataset(torch.ones(12, 2), torch.ones(12, 1)), batch_size=6),
    )
    trainer.fit("3 steps")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    total = torch.ones(1)
    if size > 1:
        dist.all_reduce(total, group=dist.new_group())
    after = listens()
    if size > 1:
        dist.barrier()  # nobody asks before all have looked
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"from {rank}", "x")
    store.wait([f"from {other}" for other in range(size)])
    print(before, after, listens(), int(total), flush=True)
"""


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_store_listens_beside_a_trainer_before_the_script_itself_asks_for_one(workers: int, tmp_path: Path) -> None:
    ended = run(tmp_path, TRAINS, "--workers", str(workers))
    assert ended.code == 0, ended.err
    assert [f"False False True {workers}" in ended.log(rank) for rank in range(workers)] == [True] * workers, ended.out


LOSES_ONE = """
    import os, signal
    import torch, torch.distributed as dist
    import manyhosts
    from manyhosts.cluster.membership import Membership
    from manyhosts.cluster.place import Place
    from manyhosts.communication.world import World, is_connection_error

    world = World(Place.from_environment(), membership=Membership.from_environment())
    line = world.membership
    if line.joins:
        world.enter(line.join(1, most=0))
    else:
        line.begin(1, most=0)
        world.barrier()
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.new_group()
        except Exception as error:
            assert is_connection_error(error), error
            print(f"heard: {error}", flush=True)
        world.abort()
        world.enter(line.regroup(1, 0))
    assert world.any(world.rank == world.size - 1)
    line.withdraw()
    total = torch.ones(1)
    dist.all_reduce(total, group=world.new_group())
    print(f"together: {int(total)}", flush=True)
"""


@pytest.mark.parametrize("workers", [2, 3])
def test_who_meets_a_worker_that_is_lost_waits_no_more_and_those_that_withdraw_meet_again(
    workers: int, tmp_path: Path
) -> None:
    ended = run(tmp_path, LOSES_ONE, "--workers", str(workers))
    assert ended.code == 0, ended.err
    for rank in range(workers):
        assert f"together: {workers}" in ended.log(rank), ended.err
        assert ("a worker of this group is lost" in ended.log(rank)) == (rank < workers - 1), (
            "from the head, and at once"
        )
