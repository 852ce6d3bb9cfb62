"""Events are kept until the trainer and the keeper have dealt with them, and handed over to the next trainer."""

import asyncio

from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.for_trainer import ForTrainer
from ray_lowcomm.runtime.journal_file import HostState


def of(host):
    made = ForTrainer(host, False, lambda: made.shown(len(made)))
    return made


def numbers(events):
    return [event.data["round"] for event in events]


def test_events_are_kept_for_both():
    async def scene():
        trainer = of(host := HostState())
        for number in range(1, 4):
            trainer.emit(Event("record", {"round": number}))
        assert numbers(await trainer.ask(0, 0.0)) == [1, 2, 3]
        assert await trainer.keep(3, 0.0) == []
        assert numbers(await trainer.ask(1, 0.0)) == [2, 3]
        assert (len(trainer.to_keep()), host.first, host.handled, host.kept) == (2, 1, 1, 3)
        await trainer.ask(3, 0.0)
        trainer.emit(Event("record", {"round": 4}))
        await trainer.ask(4, 0.0)
        assert numbers(await trainer.keep(3, 0.0)) == [4]

    asyncio.run(scene())


def test_the_next_trainer_knows_how_far_the_one_before_has_come():
    async def scene():
        before = of(HostState())
        for number in range(1, 4):
            before.emit(Event("record", {"round": number}))
            before.emit(Event("notice", {"round": number}))
        await before.ask(3, 0.0)
        assert (before._host.handled, before._host.round) == (3, 2)
        before._host.events = before.to_keep()
        again = of(before._host)  # of a driver that was started again
        again.shown(len(again))
        assert numbers(await again.ask(before._host.handled, 0.0)) == [2, 3, 3]

    asyncio.run(scene())
