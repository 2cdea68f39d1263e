"""Who takes part: admitting workers, forming payload groups, and talking to all of them.

One `Membership` belongs to one trainer. A worker that cannot be heard is marked `lost` with the reason; it stays in
the list until `evict`, so that a round can name it. Losing or gaining a member ends the generation: the next round
forms a new payload group, and no process restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from deltacast.delta.errors import DeadlineError, DeltacastError, ProtocolError, TableError, TransportError
from deltacast.delta.table import ParameterTable
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.control import Channel, Deadline, Listener, Task, wait_any
from deltacast.engines.group import PayloadGroup, Rendezvous
from deltacast.engines.protocol import (
    Ack,
    Form,
    Formed,
    Hello,
    Message,
    Ready,
    RoundKey,
    Verdict,
    Welcome,
    expect,
)
from deltacast.store.baseline import Baseline

__all__ = ["Member", "Membership"]

_LOG: Final = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Message)


@dataclass(slots=True)
class Member:
    """One worker as the trainer knows it.

    Attributes:
        channel: its control connection.
        hello: what it said of itself.
        action: how it will catch up: `leave` (nothing to do), `repair` or `seed`.
        reason: why.
        rank: in the present payload group; 1 and up.
        lost: why it is no longer heard; empty while it is.
    """

    channel: Channel
    hello: Hello
    action: str
    reason: str
    rank: int = 0
    lost: str = ""

    @property
    def name(self) -> str:
        """Host and process."""
        return self.hello.name


class Membership:
    """The workers of one trainer, their connections and their payload group.

    Attributes:
        members: by rank, lost ones included until `evict`.
        group: the present generation's, None after any change or failure.
        generation: its number.
        newest_reported: the highest version of this run that any worker reported.
        evicted: names of workers that were dropped since the caller last emptied it.

    Raises:
        TransportError: the control address cannot be bound.
    """

    def __init__(self, info: TrainerInitInfo, baseline: Baseline) -> None:
        self._info, self._baseline = info, baseline
        self._listener = Listener(info.host, info.port, bytes.fromhex(info.secret))
        self._rendezvous: Rendezvous | None = None
        self.members: list[Member] = []
        self.group: PayloadGroup | None = None
        self.generation = 0
        self.newest_reported = baseline.version
        self.evicted: list[str] = []
        self.client_task: Task | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where workers connect."""
        return self._listener.host, self._listener.port

    def close(self) -> None:
        """Close every connection and the group; may be called twice."""
        for member in self.members:
            member.channel.close()
        self.members.clear()
        self.drop_group()
        self._listener.close()

    # Admission.

    def admit_next(self, deadline: Deadline) -> None:
        """Wait for one worker and admit it.

        Raises:
            DeadlineError: none came in time.
            TransportError: the client's call failed meanwhile.
            TableError, DeltacastError: it cannot be served; it was told why.
        """
        channel = self._listener.accept(deadline, self.client_task)
        self.raise_client_error()
        if channel is not None:
            self._admit(channel, deadline)

    def admit_waiting(self) -> None:
        """Admit the workers that have connected meanwhile; one that cannot be served is told so and dropped."""
        while self._listener.has_waiting():
            channel = self._listener.accept_waiting()
            if channel is not None:
                try:
                    self._admit(channel, Deadline(self._info.timeout_s))
                except DeltacastError as err:
                    _LOG.warning("deltacast turned a worker away: %s", err)

    def _admit(self, channel: Channel, deadline: Deadline) -> None:
        try:
            message, bulk = channel.receive(deadline)
            hello = expect(message, Hello)
            channel.peer = f"worker {hello.name}"
            action, reason = self._judge(hello, bulk)
            self._welcome(channel, action, reason, deadline)
        except TableError as err:
            self._welcome(channel, "refuse", str(err), deadline)
            channel.close()
            raise
        except BaseException:
            channel.close()
            raise
        _LOG.info("deltacast admits worker %s: %s (%s)", hello.name, action, reason)
        self.members.append(Member(channel, hello, action, reason))
        self.drop_group()
        if hello.run_id == self._info.run_id:
            self.newest_reported = max(self.newest_reported, hello.version)

    def _welcome(self, channel: Channel, action: str, reason: str, deadline: Deadline) -> None:
        key = RoundKey(self._info.epoch, self.generation, 0)
        channel.send(Welcome(self._info.run_id, key, action, self._baseline.version, reason), deadline)

    def _judge(self, hello: Hello, table: bytes) -> tuple[str, str]:
        """Say how a worker catches up, by what it holds and never by a guess."""
        who = f"worker {hello.name}"
        self._baseline.state.table.require_equal(ParameterTable.from_json(table), who=who)
        same_run = hello.run_id == self._info.run_id
        if same_run and hello.key.epoch > self._info.epoch:
            raise TableError(
                f"{who} has seen a newer writer of this run",
                expected=f"epoch <= {self._info.epoch}",
                found=hello.key.epoch,
            )
        if hello.damaged and same_run and hello.version == self._baseline.version:
            return "repair", f"damaged: {', '.join(hello.damaged[:3])}"
        if hello.digest != self._baseline.digest or hello.damaged:
            return "seed", f"it holds {hello.digest}, the trainer {self._baseline.digest}"
        return "leave", "it holds the trainer's bits"

    # Generations.

    def ensure_group(self) -> None:
        """Form a payload group of everybody under the next generation, unless there is one.

        A member that does not come is evicted and the rest start over.

        Raises:
            TransportError: no worker is left.
        """
        self.evict()
        while self.group is None:
            if not self.members:
                raise TransportError("no worker is left", hint="Start one with this trainer's worker_init_info.")
            self.generation += 1
            for rank, member in enumerate(self.members, start=1):
                member.rank = rank
            self._try_form()
            self.evict()

    def _try_form(self) -> None:
        deadline = Deadline(self._info.timeout_s)
        host, world_size = self.members[0].channel.local_host, len(self.members) + 1
        key = RoundKey(self._info.epoch, self.generation, 0)
        rendezvous = Rendezvous(host, world_size, self._info.timeout_s)
        task = Task("form", lambda: self._meet(rendezvous, world_size, host))
        for member in self.members:
            form = Form(self._info.run_id, key, host, rendezvous.port, member.rank, world_size)
            self.tell([member], form, deadline)
        formed, errors = self.collect(Formed, key, deadline)
        errors |= {rank: answer.error for rank, answer in formed.items() if answer.error}
        for member in self.members:
            if member.rank in errors:
                member.lost = member.lost or errors[member.rank]
        if not task.join(self._info.timeout_s):
            raise DeadlineError("forming the payload group did not end", hint="Restart this trainer.")
        if task.error is not None or errors:
            _LOG.warning("deltacast could not form generation %d: %s %s", self.generation, task.error, errors)
            self.drop_group()

    def _meet(self, rendezvous: Rendezvous, world_size: int, interface: str) -> None:
        self._rendezvous = rendezvous  # keeps the store open for this generation
        self.group = PayloadGroup(
            rendezvous.store,
            rank=0,
            world_size=world_size,
            generation=self.generation,
            device=torch.device(self._info.device),
            timeout_s=self._info.timeout_s,
            interface=interface,
        )

    def drop_group(self) -> None:
        """Abort the payload group; the next round forms a new one."""
        if self.group is not None:
            self.group.abort()
            self.group = None
        self._rendezvous = None

    def evict(self) -> None:
        """Drop the members that are lost, and with them the group."""
        lost = [member for member in self.members if member.lost]
        for member in lost:
            _LOG.warning("deltacast evicts worker %s: %s", member.name, member.lost)
            self.evicted.append(member.name)
            member.channel.close()
        if lost:
            self.members = [member for member in self.members if not member.lost]
            self.drop_group()

    def notice_closed(self) -> None:
        """Mark the members whose connection was closed while nobody listened."""
        for member in self.members:
            if not member.lost and (reason := member.channel.gone()):
                member.lost = reason

    # Talking.

    def tell(self, members: Iterable[Member], message: Message, deadline: Deadline, bulk: bytes = b"") -> None:
        """Send a message to members; one that cannot be told is lost."""
        for member in members:
            if not member.lost:
                try:
                    member.channel.send(message, deadline, bulk)
                except TransportError as err:
                    member.lost = str(err)

    def collect(
        self, cls: type[Answer], key: RoundKey, deadline: Deadline, have: dict[int, Answer] | None = None
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """Hear one answer of a round from every member.

        Stops at the first failure, except for acks: there everybody must have a say.

        Args:
            cls: the kind of answer.
            key: the round; answers of earlier rounds are dropped.
            deadline: for all of them; whoever misses it is lost.
            have: answers that came early.

        Returns:
            Answers and errors by rank. Rank 0 in errors is the client's own failure.
        """
        answers = dict(have or {})
        errors = {member.rank: member.lost for member in self.members if member.lost}
        while cls is Ack or not errors:
            waiting = [member for member in self.members if not member.lost and member.rank not in answers]
            if not waiting:
                break
            try:
                ready = wait_any([member.channel for member in waiting], deadline, self._running_client())
            except DeadlineError as err:
                for member in waiting:
                    member.lost = errors[member.rank] = str(err)
                break
            if isinstance(ready, Task):
                if ready.error is not None:
                    errors[0] = f"the client failed: {ready.error}"
            else:
                self.hear(next(member for member in waiting if member.channel is ready), cls, key, answers, errors)
        return answers, errors

    def hear(
        self, member: Member, cls: type[Answer], key: RoundKey, answers: dict[int, Answer], errors: dict[int, str]
    ) -> None:
        """Take what a member has sent, if it is all there; what a decision has overtaken is dropped."""
        try:
            frame = member.channel.poll()
            if frame is None:
                return
            message = frame[0]
            overtaken = cls is Ack and isinstance(message, (Ready, Verdict)) and message.key == key
            if message.key < key or overtaken:
                return
            answer = expect(message, cls)
            if answer.key != key:
                raise ProtocolError("an answer of another round", expected=key, found=answer.key)
            answers[member.rank] = answer
        except TransportError as err:
            member.lost = errors[member.rank] = str(err)

    def heard(self, members: Sequence[Member], ready: Channel | Task) -> Member | None:
        """Return the member whose channel `wait_any` returned."""
        return next((member for member in members if member.channel is ready), None)

    def raise_client_error(self) -> None:
        """Raise what the client's call raised, if it has.

        Raises:
            TransportError: from the client's own error.
        """
        task = self.client_task
        if task is not None and task.done and task.error is not None:
            raise TransportError(f"the client failed: {task.error}") from task.error

    def _running_client(self) -> Task | None:
        return self.client_task if self.client_task is not None and not self.client_task.done else None
