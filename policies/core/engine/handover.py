"""Prompts that go to another engine, or come from one: which chunks are ready to go, what came in, and what
the engine has to say of it.

Chunks go when they are published: complete, through every depth, collected. Knows no link; `commands` is what
the engine says next, in order.
"""

from collections import deque

from policies.core.memory.plan import TransferPlan
from policies.core.memory.residents import Residents
from policies.core.progress.state import RequestState
from policies.core.seam.events import Handed, Import, Lost, Received, Reserve, Send
from policies.core.seam.request import Phase, Role


class Handover:
    """The side of one engine, which does `role` of its requests."""

    def __init__(self, role: Role, residents: Residents) -> None:
        self.role = role
        self.commands: deque[Handed] = deque()
        self._residents = residents
        self._sent: dict[int, int] = {}

    def came_in(self, plan: TransferPlan) -> None:
        """Requests of `plan` have room: of those that come in for the first time, another engine begins the
        prompt now."""
        for item in plan.allocations:
            if not item.is_resumed:
                self._residents.running[item.request_id].awaits()
                self.commands.append(Reserve(item.request_id))

    def completed(self, state: RequestState, end: int) -> None:
        """Tokens up to `end` are through the last depth, and that is collected: whole chunks go."""
        start, end = self._sent.get(state.request_id, 0), state.prompt.completed(end)
        if end > start:
            self._sent[state.request_id] = end
            self.commands.append(Send(*self._what(state, start, end)))

    def received(self, mail: Received) -> None:
        """More of a prompt has come."""
        state = self._residents.running[mail.request_id]
        assert state.phase is Phase.TRANSFER, f"{state} has its prompt"
        start = state.prompt.num_prefilled_tokens
        self.commands.append(Import(*self._what(state, start, mail.end)))
        state.received(mail.end, mail.at_ns)

    def lost(self, mail: Lost) -> None:
        """No more of a prompt comes: the rest is computed here."""
        state = self._residents.running[mail.request_id]
        assert state.phase is Phase.TRANSFER, f"{state} has its prompt"
        state.computes()

    def forget(self, request_id: int) -> None:
        """A request has ended; nothing more is said of it."""
        self._sent.pop(request_id, None)
        if self.commands:
            self.commands = deque([item for item in self.commands if item.request_id != request_id])

    def _what(
        self, state: RequestState, start: int, end: int
    ) -> tuple[int, int, int, tuple[int, ...], int, bool]:
        size = self._residents.blocks.block_size
        groups = tuple(state.block_groups[start // size : -(-end // size)])
        return state.request_id, start, end, groups, state.ring_id, end == state.prompt_tokens
