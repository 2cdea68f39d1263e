"""Who takes part: admitting workers, forming payload groups, and talking to all of them.

One `Membership` belongs to one trainer. A worker that cannot be heard is marked `lost` with the reason; it stays in
the list until `evict`, so that a round can name it. Losing or gaining a member ends the generation: the next round
forms a new payload group, and no process restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch

from deltacast.delta.errors import DeadlineError, DeltacastError, ProtocolError, TableError, TransportError
from deltacast.delta.table import ParameterTable
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.control import Channel, Deadline, Task, send_all, wait_any
from deltacast.engines.group import MeetingPlace, PayloadGroup, Transport
from deltacast.engines.history import History, Replay
from deltacast.engines.opening import Listener
from deltacast.engines.pace import Pace
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
        action: how it will catch up: `leave` (nothing to do), `replay`, `repair` or `seed`; empty until it is welcomed.
        reason: why.
        replay: what a replay must send.
        damaged: what a repair must send.
        repaired: whether it was repaired or seeded in this call already.
        rank: in the present payload group; 1 and up.
        stands_by: it is still to catch up and the present round is for others: what it holds decides nothing.
        lost: why it is no longer heard; empty while it is.
    """

    channel: Channel
    hello: Hello
    action: str = ""
    reason: str = ""
    replay: Replay | None = None
    damaged: list[str] = field(default_factory=list)
    repaired: bool = False
    rank: int = 0
    stands_by: bool = False
    lost: str = ""

    @property
    def name(self) -> str:
        """Host and process."""
        return self.hello.name


class Membership:
    """The workers of one trainer, their connections and their payload group.

    Args:
        info: the trainer's.
        baseline: what every worker is to hold.
        history: knows which earlier versions lead there.
        transport: how payloads travel.

    Attributes:
        members: by rank, lost ones included until `evict`.
        group: the present generation's, None after any change or failure.
        generation: its number.
        newest_reported: the highest version of this run that any worker reported.
        evicted: names of workers that were dropped since the caller last emptied it.

    Raises:
        TransportError: the control address cannot be bound.
    """

    def __init__(self, info: TrainerInitInfo, baseline: Baseline, history: History, transport: Transport) -> None:
        self._info, self._baseline, self._history = info, baseline, history
        self._listener = Listener(info.host, (info.port,) if info.port else info.ports, bytes.fromhex(info.secret))
        self._rendezvous: MeetingPlace | None = None
        self._pace = None if info.max_send_bytes_per_s is None else Pace(info.max_send_bytes_per_s)
        self._transport = transport
        self.members: list[Member] = []
        self.group: PayloadGroup | None = None
        self.generation = 0
        self.newest_reported = baseline.version
        self.evicted: list[str] = []
        self._incomplete: list[Member] = []  # ranks of servers of which others have not come yet
        self._last_evicted = ""
        self._numbered = False
        self.client_task: Task | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where workers connect."""
        return self._listener.host, self._listener.port

    def close(self) -> None:
        """Close every connection and the group; may be called twice."""
        for member in (*self.members, *self._incomplete):
            member.channel.close()
        self.members.clear()
        self._incomplete.clear()
        self.drop_group()
        self._listener.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._listener.closed

    @property
    def link_bytes_per_s(self) -> float | None:
        """The best rate that this generation's payloads reached; None if nothing large was sent yet."""
        return None if self.group is None else self.group.link_bytes_per_s

    # Admission.

    def admit_next(self, deadline: Deadline) -> None:
        """Wait for one worker and admit it; a rank of a server only once all its ranks have come.

        Raises:
            DeadlineError: none came in time.
            TransportError: the client's call failed meanwhile.
            TableError, DeltacastError: it cannot be served; it was told why.
        """
        channel = self._listener.accept(deadline, self.client_task)
        self.raise_client_error()
        if channel is not None:
            self._admit(channel)

    def admit_waiting(self) -> None:
        """Admit the workers that have connected meanwhile; one that cannot be served is told so and dropped."""
        for channel in self._listener.accept_waiting():
            try:
                self._admit(channel)
            except DeltacastError as err:
                _LOG.warning("deltacast turned a worker away: %s", err)

    def _admit(self, channel: Channel) -> None:
        try:
            frame = channel.poll()
            assert frame is not None  # the listener has seen it
            hello = expect(frame[0], Hello)
            channel.peer = f"worker {hello.name}"
            if not 0 <= hello.server_rank < hello.num_ranks:
                expected, found = f"one of {hello.num_ranks}", hello.server_rank
                raise ProtocolError(f"{channel.peer} is no rank of its server", expected=expected, found=found)  # noqa: TRY301 - the channel must be closed
            self._check(channel, hello, frame[1])
            member = Member(channel, hello, damaged=hello.damaged)
        except BaseException:
            channel.close()
            raise
        complete = self._with_its_server(member)
        if complete:
            self.members += complete
            self.drop_group()

    def _with_its_server(self, member: Member) -> list[Member]:
        """Return who comes in with a worker: itself, or all ranks of its server; nobody while one is missing."""
        server, seat = member.hello.server, (member.hello.server, member.hello.server_rank)
        if not server:
            return [member]
        waiting = []
        for other in self._incomplete:
            if other.channel.gone() or (other.hello.server, other.hello.server_rank) == seat:
                other.channel.close()
            else:
                waiting.append(other)
        self._incomplete = [*waiting, member]
        ranks = [other for other in self._incomplete if other.hello.server == server]
        if len(ranks) < member.hello.num_ranks:
            return []
        self._incomplete = [other for other in self._incomplete if other not in ranks]
        return ranks

    def _check(self, channel: Channel, hello: Hello, table: bytes) -> None:
        who = f"worker {hello.name}"
        try:
            self._baseline.state.table.require_equal(ParameterTable.from_json(table), who=who)
            if hello.run_id == self._info.run_id and hello.key.epoch > self._info.epoch:
                expected = f"epoch <= {self._info.epoch}"
                raise TableError(f"{who} has seen a newer writer of this run", expected=expected, found=hello.key.epoch)  # noqa: TRY301 - told as well
        except TableError as err:
            self._welcome(Member(channel, hello, "refuse", str(err)), -1)
            raise

    def welcome(self) -> list[Member]:
        """Tell the members that are new how they will catch up, and return them.

        The first ones may know newer versions of this run than this trainer, which was restarted. Then its baseline
        goes by the newest version's number if that is held and has the baseline's bits, else by the next: no number
        means two things.
        """
        new = [member for member in self.members if not member.action and not member.lost]
        known = [member.hello for member in new if member.hello.run_id == self._info.run_id]
        self.newest_reported = max([self.newest_reported, *(max(hello.version, hello.newest) for hello in known)])
        if new and all(not member.action for member in self.members):
            self._number_baseline(known)
        for member in new:
            self._welcome(member, self._judge(member))
            _LOG.info("deltacast admits worker %s: %s (%s)", member.name, member.action, member.reason)
        return new

    def _number_baseline(self, known: Sequence[Hello]) -> None:
        state, first, self._numbered = self._baseline.state, not self._numbered, True
        rivals = [hello for hello in known if hello.version >= self._baseline.version]
        if rivals and all(hello.digest == state.digest for hello in rivals):
            state.version = max(hello.version for hello in rivals)
        elif rivals or (first and self.newest_reported > self._baseline.version):  # later, numbers named were our own
            state.version = self.newest_reported + 1
        else:
            return
        state.mark_audited()

    def _welcome(self, member: Member, version: int) -> None:
        key = RoundKey(self._info.epoch, self.generation, 0)
        welcome = Welcome(self._info.run_id, key, member.action, version, member.reason)
        self.tell([member], welcome, Deadline(self._info.timeout_s))

    def _judge(self, member: Member) -> int:
        """Decide how a worker catches up, by what it holds and never by a guess; return our number for that, or -1."""
        hello, digest, version = member.hello, self._baseline.digest, self._baseline.version
        if hello.digest == digest and not hello.damaged:
            member.action, member.reason = "leave", "it holds the trainer's bits"
            return version
        agreed = hello.run_id == self._info.run_id and (hello.version, hello.digest) == (version, digest)
        if agreed and all(name in self._baseline.state.table for name in hello.damaged):
            member.action, member.reason = "repair", f"damaged: {', '.join(hello.damaged[:3])}"
            return version
        member.action, member.reason = "seed", f"it holds {hello.digest}, the trainer {digest}"
        if hello.damaged:
            return -1
        try:
            member.replay = self._history.find(hello.digest)
        except DeltacastError as err:
            member.reason += f": {err}"
            return -1
        member.action, member.reason = "replay", str(member.replay)
        return member.replay.version

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
                raise TransportError(
                    f"no worker is left{self._last_evicted and f'; the last was {self._last_evicted}'}",
                    hint="Start one with this trainer's worker_init_info.",
                )
            self.generation += 1
            for rank, member in enumerate(self.members, start=1):
                member.rank = rank
            self._try_form()
            self.evict()

    def _try_form(self) -> None:
        deadline, host = Deadline(self._info.timeout_s), self.members[0].channel.local_host
        key = RoundKey(self._info.epoch, self.generation, 0)
        world_size = len(self.members) + 1
        rendezvous = self._transport.rendezvous(host, world_size, self._info.timeout_s, self._info.ports)
        for member in self.members:
            form = Form(self._info.run_id, key, rendezvous.host, rendezvous.port, member.rank, world_size)
            self.tell([member], form, deadline)
        if self._blame(*self.collect(Ready, key, deadline)):  # first, so that who is frozen makes nobody else wait
            return
        group = self._transport.group(
            rank=0,
            world_size=world_size,
            generation=self.generation,
            device=torch.device(self._info.device),
            timeout_s=self._info.timeout_s,
            interface=host,
            pace=self._pace,
        )
        if self._meet(group, rendezvous, key):
            self._rendezvous, self.group = rendezvous, group  # the store stays open for this generation

    def _meet(self, group: PayloadGroup, rendezvous: MeetingPlace, key: RoundKey) -> bool:
        task = Task("form", lambda: group.meet(rendezvous.store))
        failed = True
        try:
            failed = self._blame(*self.collect(Formed, key, Deadline(self._info.timeout_s)))
        finally:  # workers that are still in the middle of it hear of the next step, and leave as well
            if failed:
                group.abort()
            ended = task.join(0.0 if failed else self._info.timeout_s)
        if not failed and (not ended or task.error is not None):
            group.abort()
            raise TransportError(f"cannot form generation {self.generation}: {task.error or 'it did not end'}")
        return not failed

    def _blame(self, answers: Mapping[int, Ready | Formed], errors: dict[int, str]) -> bool:
        """Let the members go that failed at forming a group, and say whether any did; raises the client's error."""
        errors = errors | {rank: answer.error for rank, answer in answers.items() if answer.error}
        for member in self.members:
            member.lost = member.lost or errors.get(member.rank, "")
        self.raise_client_error()
        if errors:
            _LOG.warning("deltacast could not form generation %d: %s", self.generation, errors)
        return bool(errors)

    def drop_group(self) -> None:
        """Abort the payload group; the next round forms a new one."""
        if self.group is not None:
            self.group.abort()
            self.group = None
        self._rendezvous = None

    def evict(self) -> None:
        """Drop the members that are lost, the other ranks of their servers, and with them the group."""
        servers = {member.hello.server: member.name for member in self.members if member.lost and member.hello.server}
        for member in self.members:
            if member.hello.server in servers:
                member.lost = member.lost or f"another rank of its server is lost: {servers[member.hello.server]}"
        lost = [member for member in self.members if member.lost]
        for member in lost:
            _LOG.warning("deltacast evicts worker %s: %s", member.name, member.lost)
            self.evicted.append(member.name)
            self._last_evicted = f"{member.name}: {member.lost}"
            member.channel.close()
        if lost:
            self.members = [member for member in self.members if not member.lost]
            self.drop_group()

    def lose_all(self, why: str) -> None:
        """Let every member go: each has to come again, and says then what it holds."""
        for member in self.members:
            member.lost = member.lost or why

    def notice_closed(self) -> None:
        """Mark the members whose connection was closed while nobody listened."""
        for member in self.members:
            if not member.lost and (reason := member.channel.gone()):
                member.lost = reason

    # Talking.

    def tell(self, members: Iterable[Member], message: Message, deadline: Deadline, bulk: bytes = b"") -> None:
        """Send a message to members; one that cannot be told is lost, and delays nobody else."""
        heard = {member.channel: member for member in members if not member.lost}
        for channel, err in send_all(tuple(heard), message, deadline, bulk).items():
            heard[channel].lost = str(err)

    def tell_all(self, message: Message, deadline: Deadline, bulk: bytes = b"") -> None:
        """Send a message to every member, from the payload's thread.

        Raises:
            TransportError: one cannot be told; it is lost.
        """
        self.tell(self.members, message, deadline, bulk)
        lost = next((member for member in self.members if member.lost), None)
        if lost is not None:
            raise TransportError(f"worker {lost.name} cannot be told: {lost.lost}")

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
        answers: dict[int, Answer] = dict(have or {})
        errors = {member.rank: member.lost for member in self.members if member.lost}
        hear_all = cls.kind == Ack.kind
        while hear_all or not errors:
            if not hear_all and (error := self._client_error()):
                errors[0] = error
                break
            waiting = [member for member in self.members if not member.lost and member.rank not in answers]
            if not waiting:
                break
            try:
                ready = wait_any([member.channel for member in waiting], deadline, self._running_client())
            except DeadlineError as err:
                for member in waiting:
                    member.lost = errors[member.rank] = str(err)
                break
            speaker = self.heard(waiting, ready)
            if speaker is not None:
                self.hear(speaker, cls, key, answers, errors)
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
            if message.run_id != self._info.run_id:
                raise ProtocolError("a message of another run", expected=self._info.run_id, found=message.run_id)
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
        """Return the member whose channel `wait_any` returned; None for a task."""
        return next((member for member in members if member.channel is ready), None)

    def raise_client_error(self) -> None:
        """Raise what the client's call raised, if it has.

        Raises:
            TransportError: from the client's own error.
        """
        if (error := self._client_error()) and self.client_task is not None:
            raise TransportError(error) from self.client_task.error

    def _client_error(self) -> str:
        task = self.client_task
        return f"the client failed: {task.error}" if task is not None and task.error is not None else ""

    def _running_client(self) -> Task | None:
        return self.client_task if self.client_task is not None and not self.client_task.done else None
