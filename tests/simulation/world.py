"""Runs one schedule after another, each from the same beginning to its rest.

    begin     empty tables, the scenario's messages, started processes
    explore   step by step, by the schedule
    rest      everybody goes on, the dead come back, one more copy of everything arrives, time passes over every fence
    check     the invariants

Calls that are still on their way at the end arrive after all fences, when it is too late for them to be right.
"""

from collections.abc import Callable, Sequence
from typing import Any

from faregate import ids
from faregate.message import Envelope
from tests.simulation.audit import Violation
from tests.simulation.broker import Copy, SimDelivery, SimTogether
from tests.simulation.guide import Guide
from tests.simulation.ports import LateCall
from tests.simulation.process import Process, SimProcess
from tests.simulation.scheduler import LONGEST, Option, Step
from tests.simulation.stage import Stage

_ROUNDS = 150
_PAST_THE_FENCES = 130.0


class World(Stage):
    def run(self, schedule: Sequence[int], guide: Guide | None = None) -> list[Step]:
        """Run a schedule, or by a guide as far as that leads, to its rest, and check. Raises `Violation`."""
        self._spent = dict.fromkeys(("preemption", "crash", "fault"), 0)
        self._swept = self._jumps = 0
        self._over = False
        self._operator = list(self.scenario.operator)
        self.set_up()
        forced = iter(schedule)
        for _ in range(LONGEST):
            self.loop.run_ready()
            self._raise_errors()
            options = self._options()
            if not options:
                break
            taken = 0 if guide is None else guide.choose([each.label for each in options])
            if len(options) > 1:
                taken = next(forced, taken)
                self.steps.append(Step([each.label for each in options], [each.kind for each in options], taken))
            option = options[taken]
            if option.kind in self._spent:
                self._spent[option.kind] += 1
            self.scheduler.grow_old()
            option.action()
        self._rest()
        self.audit.check()
        self.scenario.check(self)
        return self.steps

    def _raise_errors(self) -> None:
        for context in self.loop.errors:
            if context.get("exception") is not None:
                raise context["exception"]

    # --- what can happen ---

    def _options(self) -> list[Option]:
        """What can happen now; the first is what happens by default."""
        scheduler, scenario = self.scheduler, self.scenario
        options = scheduler.going()
        kind: Any = "preemption" if scheduler.current() is not None else "switch"
        takers = any(process.started for process in self.processes)
        for copy in self.broker.available(scenario.in_exploration) if takers else ():
            options.append(Option(f"deliver {copy}", kind if options else "go", self._deliver(copy)))
        if not options:
            if self._over:
                return []
            options.append(Option("time passes", "go", self._pass_time))
        elif self._jumps < scenario.jumps and self._somebody_waits():
            options.append(Option("time passes", kind, self._pass_time))
        for late in self.late:
            options.append(Option(f"{late.name} arrives", kind, self._arrive(late)))
        if self._operator:
            options.append(Option(f"operator {len(scenario.operator) - len(self._operator)}", kind, self._operate))
        if self._swept < scenario.sweeps:
            options.append(Option("sweep", kind, self._sweep))
        if self._spent["fault"] < scenario.faults:
            options += [*scheduler.failing(), *self._disturbances()]
        crashing = scheduler.last_process()
        if crashing is not None and self._spent["crash"] < scenario.crashes:
            options.append(Option(f"crash {crashing}", "crash", self._crash(crashing)))
        return options

    def _disturbances(self) -> list[Option]:
        options = []
        if self.scenario.leases:
            for copy in self.broker.copies:
                if copy.held is not None and not copy.redelivered:
                    options.append(Option(f"lease of {copy} ends", "fault", self._expire(copy)))
        if self.scenario.looks:
            for process in self.processes:
                if self.loop.has_timers(process):
                    options.append(Option(f"{process} looks", "fault", lambda one=process: self.loop.fire_timers(one)))
        return options

    def _somebody_waits(self) -> bool:
        return self.clock.sleepers > 0 or any(copy.waits for copy in self.broker.unsettled())

    def _pass_time(self) -> None:
        """Nobody has anything to do: the next timer, if somebody waits for one."""
        self._jumps += 1
        if self.scenario.lanes and self._tell_slow():
            return
        delay = self.clock.next_timer()
        if delay is None or self._jumps > self.scenario.jumps:
            self._over = True
        else:
            self.clock.jump(delay)

    def _tell_slow(self) -> bool:
        """A handler that waits has taken twice the time of a batch; whether that sets anything going."""
        before = len(self.scheduler.waiting)
        for process in 2 * self.processes:
            self.loop.fire_timers(process, "_watch")
            self.loop.run_ready()
        return len(self.scheduler.waiting) > before

    def _deliver(self, copy: Copy) -> Callable[[], None]:
        def action() -> None:
            process = min((each for each in self.processes if each.started), key=lambda each: len(each.held))
            self._hand(copy, process)

        return action

    def _hand(self, copy: Copy, process: SimProcess) -> None:
        in_lanes = process.lanes is not None and copy.node == "a"
        copies = [copy]
        if self.scenario.batch > 1 and not copy.redelivered:
            others = self.broker.available([copy.node], withheld=not in_lanes)
            copies += [each for each in others if each is not copy and not each.redelivered][: self.scenario.batch - 1]
        modes = self.scenario.modes.get("delivery.settle", ())
        kind = SimTogether if self.scenario.together else SimDelivery
        deliveries = [kind(self.broker, self.scheduler, each, modes) for each in copies]
        process.held.update(dict.fromkeys(deliveries))
        if in_lanes:
            process.submit(deliveries)
        else:
            self.scheduler.run_as_last(process.spawn(process.handle(deliveries)))

    def _arrive(self, late: LateCall) -> Callable[[], None]:
        def action() -> None:
            self.late.remove(late)
            self.loop.create_task(late.call())  # type: ignore[arg-type]

        return action

    def _expire(self, copy: Copy) -> Callable[[], None]:
        return lambda: self.broker.give_back(copy)

    def _operate(self) -> None:
        coroutine = self._operator.pop(0)(self)
        if coroutine is not None:
            self.loop.create_task(coroutine)

    def _sweep(self) -> None:
        self._swept += 1
        process = self.processes[0]
        self.scheduler.run_as_last(process.spawn(process.sweep()))

    def _crash(self, process: Process) -> Callable[[], None]:
        def action() -> None:
            process.crash()
            self.loop.run_ready()
            self._restart(process)

        return action

    def _restart(self, dead: Any) -> None:
        process = SimProcess(self, dead.name + "'")
        self.processes[self.processes.index(dead)] = process
        self.scheduler.run_as_last(process.spawn(process.start()))

    # --- to rest ---

    def _rest(self) -> None:
        self.scheduler.release_all()
        self._settle()
        while self._operator:
            self._operate()
            self._settle()
        self.scenario.at_rest(self)
        self._settle()
        ended = self.ended()
        for envelope, node in list(self.broker.signals):
            if (node, ids.message_id(envelope.publication_id, node)) in ended:  # others must not be saved by this
                self.come_again(envelope, node)
        self._settle()
        self._pass_fences()
        if self.late:
            late, self.late[:] = list(self.late), []
            for call in late:
                self.loop.create_task(call.call())  # type: ignore[arg-type]
                self._settle()
            self._pass_fences()

    def come_again(self, envelope: Envelope, node: str) -> None:
        self.broker.put(envelope, node)

    def _pass_fences(self) -> None:
        self.clock.jump(_PAST_THE_FENCES)
        self._settle()
        self.processes[0].spawn(self.processes[0].sweep())
        self._settle()

    def _look_again(self) -> None:
        """Whoever looks into the outbox now and then does so."""
        for process in self.processes:
            self.loop.fire_timers(process)

    def _settle(self) -> None:
        """Let everything happen that does not need a decision. Raises `Violation` when it never ends."""
        for _ in range(_ROUNDS):
            self.loop.run_ready()
            self._raise_errors()
            if self._somebody_waits():
                self.clock.jump(self.clock.next_timer() or 0.0)
            elif available := self.broker.available(list(self.nodes)):
                self._hand(available[0], self.processes[0])
            elif self.query("select 1 from faregate_outbox where dispatched_at is null limit 1"):
                self._look_again()
            else:
                return
        raise Violation(6, f"it never comes to rest: {[str(copy) for copy in self.broker.unsettled()]} are unsettled")
