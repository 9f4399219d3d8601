"""`faregate rabbitmq migrate` and `repartition`, killed with SIGKILL at any step, and run again: they end right."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rabbitmq.site import Site, in_order
from tests.rabbitmq.test_operations import OTHER, otherwise

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 1_000_000
COMMANDS = {"migrate": ["migrate"], "repartition": ["repartition", "--to", "3"]}


async def run(site: Site, steps: int, name: str) -> bool:
    """Whether it came to its end within so many steps."""
    command = site.command("tests.rabbitmq.site:bus", *COMMANDS[name])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.rabbitmq.killed", str(steps), *command),
        cwd=ROOT,
        env=site.environment,
        stdout=subprocess.DEVNULL,
    )
    assert await process.wait() in (0, -signal.SIGKILL)
    return process.returncode == 0


async def set_up(site: Site, name: str) -> None:
    if name == "migrate":
        site.partitions = 1
        await otherwise(site, **OTHER)
    else:
        site.partitions = 2
        await site.bus().prepare()
    await site.publish(28)


async def go_through(site: Site, name: str, *kills: int) -> int:
    """Each run is killed at a step; messages come between them. The last one is left alone. How many were killed: one
    with fewer steps comes to its end."""
    published, killed = 28, 0
    await set_up(site, name)
    for steps in kills:
        killed += not await run(site, steps, name)
        await site.publish_more(published, published + 7)
        published += 7
    assert await run(site, ENOUGH, name)
    assert await site.effects(published) == in_order(published)
    assert not [queue for queue in await site.left() if name == "repartition" and ".g1-" in queue]
    return killed


async def test_a_change_of_partitions_that_is_killed_again_and_again_ends_right(postgres_site: Site) -> None:
    assert await go_through(postgres_site, "repartition", 15, 23, 31) == 3


async def test_a_migration_that_is_killed_again_and_again_ends_right(postgres_site: Site) -> None:
    assert await go_through(postgres_site, "migrate", 14, 18) == 2


@pytest.mark.full
@pytest.mark.parametrize("steps", range(3, 90, 18))
@pytest.mark.parametrize("name", COMMANDS)
async def test_a_command_goes_on_wherever_it_was_killed(any_site: Site, name: str, steps: int) -> None:
    await go_through(any_site, name, steps)
