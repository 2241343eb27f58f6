"""The workers that train together, and this one's place among them.

One `World` lives as long as the worker. Its members may change (a worker dies, another joins), so code that uses the
others holds the world and asks it, and never keeps a rank or a size.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhosts import device
from manyhosts.cluster import reports, store_line
from manyhosts.cluster.membership import Group, Membership, PartOfCopy
from manyhosts.cluster.place import REHEARSING, Place
from manyhosts.cluster.ports import VARIABLE
from manyhosts.communication import sockets
from manyhosts.communication.channel_store import ChannelStore
from manyhosts.communication.collectives import Collectives, Waitable, Work
from manyhosts.communication.groups import abort_groups, live_without_others
from manyhosts.errors import CommunicationError, ConfigError, first_line
from manyhosts.events import Event

_GLANCE = timedelta(seconds=2)
"""How long a wait lasts before a look at whether the group is broken."""
_GRACE_S = 3.0
"""How long Gloo has to end a wait by itself once the sockets are shut."""
_NEWS_OF_A_BREAK = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe", re.IGNORECASE)


class World(Collectives):
    """`size` workers, of which this is number `rank`. With one worker nothing is sent and no group is made."""

    def __init__(
        self,
        place: Place,
        *,
        backend: str | None = None,
        timeout_s: float = 600,
        membership: Membership | None = None,
    ) -> None:
        """Join the group that `place` names. One that joins while others train is alone until it `enter`s.

        Raises:
            ConfigError: the backend cannot work here.
            CommunicationError: the others could not be reached in `timeout_s` seconds.
        """
        self.is_joining = membership is not None and membership.joins
        """Whether this worker has not met the others yet: it acts as if it were alone."""
        self.part = PartOfCopy.from_environment() if self.is_joining else None
        """Where several workers make one copy of a model, the place that a worker has which was started late."""
        self.membership = membership
        self.place = replace(place, rank=0, size=1) if self.is_joining else place
        is_rehearsal = REHEARSING in os.environ
        self.device = torch.device("cpu") if is_rehearsal else device.of_worker(place.local_rank, rank=place.rank)
        self.backend = device.backend_for(self.device) if backend is None or is_rehearsal else backend
        self.timeout_s = timeout_s
        if self.backend == "nccl" and not device.is_asynchronous(self.device):
            raise ConfigError(
                "backend is 'nccl', but this worker has no GPU",
                where=f"rank {place.rank}",
                fix="leave backend out: Gloo carries the data between CPUs",
            )
        self.exposed_s = 0.0
        """Seconds this worker has waited in collectives, all in all; on a GPU see `take_waits`."""
        self.exchange_s = 0.0
        """Seconds from each exchange's begin to its end, whether they were waited for or not; CPUs only."""
        self._waits: list[tuple[device.Event, device.Event]] = []
        self.bytes_sent = 0
        """Payload this worker has put on the wire, all in all, as `communication.volume` counts it."""
        self.notes: list[str] = []
        """What is worth saying once, until somebody takes it."""
        self.news: list[Callable[..., Event]] = []
        """The same as events, which are yet to be given their step and time."""
        self._sockets = sockets.Mine()
        self._store: ChannelStore | None = None
        """The rendezvous of the present group, and of groups that are made of it; C++ has only half of it."""
        self._broken_at = 0.0
        """When the present group was aborted, by the monotonic clock; 0 where it was not."""
        self.confirms = False
        """Whether the host waits for every exchange of a GPU: see `confirm`."""
        self.in_doubt = False
        """Whether a call ended in a failure, so that exchanges may be under way to which others do not come."""
        if self.size > 1 and not dist.is_initialized():
            # env:// honours TORCHELASTIC_USE_AGENT_STORE: a store kept by the launcher; mpirun and srun set nothing
            here = f"tcp://{place.head_address}:{place.head_port}"
            self._form(init_method="env://" if "RANK" in os.environ else here)
        if membership is not None:
            membership.on_broken = self.abort

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.place.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.place.size

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the worker that writes and reports for all."""
        return self.rank == 0

    @property
    def is_broken(self) -> bool:
        """Whether the present group was aborted, so that no exchange in it would come to an end."""
        return self._broken_at > 0

    @property
    def is_shared(self) -> bool:
        """Whether there are other workers, or may be some day."""
        return self.size > 1 or self.membership is not None

    def enter(self, group: Group) -> None:
        """Be a member of `group`, in place of the one before.

        Raises:
            CommunicationError: the others could not be met; some of them may be gone again.
        """
        self.leave()
        if self._store is not None:
            self._store.close()
        self.is_joining, self._broken_at = False, 0.0
        if self.membership is not None and self.membership.is_broken:
            raise CommunicationError(
                f"rank {group.rank} was to join workers that are gone again",
                where=f"group {group.number}",
                fix="see what was printed about the others",
            )
        self.place = replace(
            self.place,
            rank=group.rank,
            size=group.size,
            local_rank=group.local_rank,
            local_size=group.local_size,
            node_rank=group.node_rank,
            head_address=group.address,
            head_port=group.port,
        )
        os.environ.update(_variables(self.place, group))  # for what the script or a loader's process asks later
        if self.size > 1:
            self._form(group=group)

    def _form(self, *, init_method: str | None = None, group: Group | None = None) -> None:
        place, timeout = self.place, timedelta(seconds=self.timeout_s)
        if self.membership is not None and device.is_asynchronous(self.device):
            self.notes += filter(None, [live_without_others()])
        own = self._store = self._channel_store(group)
        store: Any = own
        if own is not None and self.membership is not None and self.membership.is_broken:
            own.close()  # `abort` came before there was this one
        try:
            with self._sockets.opened(), nullcontext() if own is None else own.expecting(place.size):
                if own is not None:
                    init_method = None
                elif group is not None:
                    client = dist.TCPStore(group.address, group.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]  # torch names it public all the same
                    store = dist.PrefixStore(group.key, client)  # type: ignore[attr-defined]
                dist.init_process_group(
                    self.backend,
                    init_method=init_method,
                    store=store,
                    rank=place.rank,
                    world_size=place.size,
                    timeout=timeout,
                    device_id=self.device if self.backend == "nccl" else None,
                )
        except (RuntimeError, ValueError) as cause:
            ports = os.environ.get(VARIABLE)
            if ports and "Address already in use" in str(cause):
                raise CommunicationError(
                    f"none of the ports {ports} is free for rank {place.rank}",
                    where="Gloo",
                    fix="give a wider range with --ports, or end what holds them: `ss -tlnp` lists it",
                ) from cause
            raise CommunicationError(
                f"rank {place.rank} of {place.size} could not connect to the others: {first_line(cause)}",
                where=f"store at {place.head_address}:{place.head_port}" if own is None else "the channel to the head",
                fix="see that every worker was started with the same address and that no firewall is between them",
            ) from cause

    def _channel_store(self, group: Group | None) -> ChannelStore | None:
        """The rendezvous of Gloo's workers whose agent passes messages on: the head keeps it. None for others.

        NCCL asks its store from threads of its own for the entire run, which must not wait for Python.
        """
        address = os.environ.get(reports.VARIABLE)
        if self.membership is None or self.backend != "gloo" or not address:
            return None
        start, number = self.place.restart, 0 if group is None else group.number
        line = store_line.StoreLine(address, start=start, group=number)
        return ChannelStore(line, timedelta(seconds=self.timeout_s))

    @property
    def process_group(self) -> None:
        """The default one."""
        return

    @property
    def is_on_one_host(self) -> bool:
        """Whether all workers are on this host, as far as the launcher has said."""
        return self.place.local_size == self.size

    def count_waited(self, seconds: float) -> None:
        """Count so many seconds as waited for others."""
        self.exposed_s += seconds

    def count_sent(self, payload: int) -> None:
        """Count so many bytes as put on the wire."""
        self.bytes_sent += payload

    @property
    def group(self) -> object:
        """What is another object whenever the workers have changed."""
        return dist.group.WORLD if self.size > 1 else self

    def new_group(self, ranks: Sequence[int] | None = None, *, backend: str = "") -> dist.ProcessGroup | None:
        """A further group, of some of the workers or all; made by all together, and gone with the group of all."""
        own, size = self._store, self.size if ranks is None else len(ranks)
        with self._sockets.opened(too=True), nullcontext() if own is None else own.expecting(size):
            group: dist.ProcessGroup | None = dist.new_group(
                None if ranks is None else list(ranks),
                timeout=timedelta(seconds=self.timeout_s),
                backend=backend or self.backend,
            )
        return group

    def new_groups(self, parts: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
        """A further group for each of `parts`, made by all together: the part that this worker is in, and its group."""
        made = [(ranks, self.new_group(ranks)) for ranks in parts]
        return next(own for own in made if self.rank in own[0])

    def abort(self) -> None:
        """Make every wait for the others fail at once, in this worker and in them. May be called from any thread."""
        self._broken_at = time.monotonic()  # first: see `confirm`
        if device.is_asynchronous(self.device) and dist.is_initialized():
            abort_groups(self.device)
        self._sockets.shut()
        if (store := self._store) is not None:
            store.close()

    def leave(self) -> None:
        """Take the group down. Safe to call twice."""
        if not dist.is_initialized():
            return
        if device.is_asynchronous(self.device) and (self.is_broken or self.in_doubt):
            # To destroy a group of NCCL is to wait for what is under way in it.
            dist.distributed_c10d._abort_process_group()
            device.wait_for(self.device)
        else:
            dist.destroy_process_group()

    def confirm(self) -> None:
        """See that all exchanges that were asked for so far came to their end, where others continue without a lost
        one.

        On a GPU an exchange that is cut off ends without a word, and leaves anything at all. So the host waits, and an
        abort leaves its mark before it cuts anything off: where there is none after the wait, all is complete.

        Raises:
            CommunicationError: the group is broken.
        """
        if not self.confirms or not device.is_asynchronous(self.device):
            return
        device.module(self.device).current_stream(self.device).record_event().synchronize()
        if self.is_broken:
            raise CommunicationError(
                f"rank {self.rank} exchanged something with workers that are gone",
                where="the group that broke",
                fix="see what was printed about the others",
            )

    def drain(self) -> bool:
        """Whether this worker's device comes to the end of what it was asked for, and all of that is complete.

        An exchange to which others do not come is cut off after some seconds.
        """
        if not device.is_asynchronous(self.device) or self.size == 1:
            return True
        event, end = device.module(self.device).current_stream(self.device).record_event(), time.monotonic() + _GRACE_S
        while not (is_over := event.query()) and time.monotonic() < end:
            time.sleep(0.01)
        if not is_over:
            self.abort()
        return not self.is_broken

    def wait(self, work: Work, *, confirmed: bool = True) -> None:
        """Wait for what `start_all_reduce` began. On a GPU it is the stream that waits, not this thread.

        `confirmed`: `confirm` it. What only goes into a later exchange, which is confirmed, need not be.
        """
        if work is None:
            return
        if device.is_asynchronous(self.device):
            module = device.module(self.device)
            before, after = module.Event(enable_timing=True), module.Event(enable_timing=True)
            before.record()
            work.wait()
            after.record()
            self._waits.append((before, after))
            if confirmed:
                self.confirm()
            return
        begin = time.perf_counter()
        self._wait_on(work)
        self.exposed_s += time.perf_counter() - begin

    def _wait_on(self, work: Waitable) -> None:
        """Wait for `work`, but not for one that has been broken off.

        Gloo ends its waits when a socket is shut, except one for a message of which a part had come already (seen with
        torch 2.13): that one would last until the timeout. It is left to its thread, and the group is never used again.

        Raises:
            CommunicationError: the group is broken, and Gloo has not noticed.
        """
        if self.membership is None or not isinstance(work, dist.Work):
            work.wait()
            return
        while True:
            try:
                work.wait(_GLANCE)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what went wrong, unless it has come this moment
                    return
                if self._broken_at and time.monotonic() - self._broken_at > _GRACE_S:
                    raise CommunicationError(
                        f"rank {self.rank} waited for workers that are gone",
                        where="the group that broke",
                        fix="see what was printed about the others",
                    ) from None
            else:
                return

    def take_waits(self) -> list[tuple[device.Event, device.Event]]:
        """The waits of this worker's GPU since the last call: what is between two events is exposed time."""
        waits, self._waits = self._waits, []
        return waits

    def start_exchange(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Work:
        """Begin to give each worker its rows of `sent` and to fill `received` with what each gave us, by rank."""
        own = sent_rows[self.rank] * sent[:1].numel()  # which stay here
        self.count_sent((sent.numel() - own) * sent.element_size())
        work: Work = dist.all_to_all_single(received, sent, list(received_rows), list(sent_rows), async_op=True)
        return work

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send `tensor` to one worker, who must `receive` one of its shape and dtype."""
        self.bytes_sent += tensor.numel() * tensor.element_size()
        dist.send(tensor, dst=rank)
        self.confirm()

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Fill `tensor` with what worker `rank` sends, and give it back."""
        dist.recv(tensor, src=rank)
        self.confirm()
        return tensor

    def start_send(self, tensor: Tensor, rank: int, tag: int = 0) -> Work:
        """Begin to send `tensor` to one worker, who must begin to receive one of its shape, dtype and `tag`."""
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return dist.isend(tensor, dst=rank, tag=tag)

    def start_receive(self, tensor: Tensor, rank: int, tag: int = 0) -> Work:
        """Begin to fill `tensor` with what worker `rank` sends with this `tag`."""
        return dist.irecv(tensor, src=rank, tag=tag)


def is_connection_error(error: BaseException) -> bool:
    """Whether `error` says that the connection to other workers broke, and not that something else went wrong."""
    return isinstance(error, CommunicationError | dist.DistError) or (
        isinstance(error, RuntimeError) and _NEWS_OF_A_BREAK.search(str(error)) is not None
    )


def _variables(place: Place, group: Group) -> dict[str, str]:
    """What torchrun would set for this worker now."""
    words = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": group.nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.size,
        "MASTER_ADDR": place.head_address,
        "MASTER_PORT": place.head_port,
        store_line.PORT: place.head_port,
        store_line.SHUT: 1,  # as far as is known here
    }
    return {name: str(word) for name, word in words.items()}
