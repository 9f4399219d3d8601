"""`ctx.session`: SQLAlchemy on the transaction of the unit of work, in both kinds of handlers, on every store."""

import asyncio
import enum
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, MissingGreenlet
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, object_session

import faregate as fg
from faregate.core.session import open_session
from faregate.errors import StoreConflict, TransactionMisused
from faregate.stores.postgres.transaction import PostgresTransaction
from faregate.stores.sqlite.transaction import SqliteTransaction
from faregate.testing.clock import rest
from tests.core.rig import LONG, Answered, Asked, notes, numbers

SCHEMA = "create table if not exists notes(n integer primary key, text varchar(200))"


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    n: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str | None] = mapped_column(sa.String(200))


class Effect:
    def __init__(self, n: int) -> None:
        self.n = n


async def run(
    url: str, handle: Callable[..., Any], *, count: int = 6, prepare: Any = None, **options: Any
) -> tuple[list[int], list[int], dict[str, int], list[fg.DeadLetter]]:
    """Everything published at once: what is in the table, what was answered, how it ended, and the dead letters."""
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=SCHEMA), fg.Node("hearing")
    answers: list[int] = []
    policy = {"order": fg.Parallel(1), "retry": fg.Retry(2, delay=0.001), "redeliver": None, **options}
    answering.on(Asked, source="asking", **policy)(handle)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        answers.append(answered.n)

    if prepare is not None:
        prepare(answering)
    async with fg.Bus("memory:", nodes=[asking, answering, hearing], store=url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(count), node="asking")
        await bus.idle(timeout=LONG)
        return await notes(bus), sorted(answers), dict(bus.outcomes()), await bus.dead_letters()


@pytest.fixture(params=["def", "async def"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def handler(kind: str, work: Callable[[Asked, fg.Context, Session], Any]) -> Callable[..., Any]:
    """The same work in either kind of handler; `run_sync` is SQLAlchemy's own way to say so."""

    def plain(asked: Asked, ctx: fg.BlockingContext) -> Any:
        return work(asked, ctx, ctx.session)

    async def awaited(asked: Asked, ctx: fg.AsyncContext) -> Any:
        return await ctx.session.run_sync(lambda session: work(asked, ctx, session))

    return plain if kind == "def" else awaited


async def test_what_a_session_has_pending_commits_with_the_answer_once(
    either_way: str, kind: str, units: list[tuple[int, bool]]
) -> None:
    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        session.add(Note(n=asked.n))
        return Answered(n=asked.n)

    written, answers, outcomes, _ = await run(either_way, handler(kind, work))
    assert (written, answers) == ([*range(6)], [*range(6)])
    assert outcomes["handled"] == 12
    assert max(size for size, _ in units) > 1  # who asks for a session shares its transaction with others


async def test_in_memory(kind: str) -> None:
    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        session.add(Note(n=asked.n))
        return Answered(n=session.scalar(sa.select(sa.func.count()).select_from(Note)) or 0)

    written, answers, _, _ = await run("memory:", handler(kind, work))
    assert (written, answers) == ([*range(6)], [*range(1, 7)])


async def test_a_session_is_what_the_function_is(store_url: str) -> None:
    async def awaited(asked: Asked, ctx: fg.Context) -> None:
        assert isinstance(ctx.session, AsyncSession)
        assert ctx.session is ctx.session
        ctx.session.add(Note(n=asked.n, text="one"))
        note = (await ctx.session.scalars(sa.select(Note).where(Note.n == asked.n))).one()
        await ctx.session.refresh(note)
        async with ctx.session.begin_nested():
            note.text = "two"
        rows = await ctx.session.stream(sa.select(Note.text))
        assert [row.text async for row in rows] == ["two"]
        assert (await (await ctx.session.connection()).scalar(sa.text("select 1"))) == 1
        with pytest.raises(MissingGreenlet):
            ctx.session.sync_session.scalar(sa.text("select 1"))  # as everywhere with SQLAlchemy

    def plain(asked: Asked, ctx: fg.Context) -> None:
        assert type(ctx.session).__mro__[1] is Session
        assert ctx.session is ctx.session

    assert (await run(store_url, awaited, count=1))[2]["handled"] == 1
    assert (await run("memory:", plain, count=1))[2]["handled"] == 1


async def test_nothing_of_a_try_that_fails_behind_its_flush_is_there(either_way: str, kind: str) -> None:
    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        session.add(Note(n=asked.n))
        session.flush()
        if asked.n % 3 == 1:
            raise RuntimeError("behind the flush")
        return Answered(n=asked.n)

    written, answers, outcomes, letters = await run(either_way, handler(kind, work))
    assert written == answers == [0, 2, 3, 5]
    assert outcomes["dead"] == 2
    assert {letter.error.splitlines()[0] for letter in letters} == {"RuntimeError: behind the flush"}


async def test_a_refused_flush_is_the_failure_of_its_message_and_tried_again(either_way: str, kind: str) -> None:
    attempts: set[tuple[int, int]] = set()

    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        attempts.add((asked.n, ctx.attempt))
        session.add(Note(n=1000 + asked.n))
        if asked.n == 4 or (asked.n == 2 and ctx.attempt < 3):
            session.execute(sa.insert(Note).values(n=2000 + asked.n))
            session.add(Note(n=2000 + asked.n))  # refused when the handler has returned
        return Answered(n=asked.n)

    written, answers, outcomes, [letter] = await run(either_way, handler(kind, work))
    assert written == [1000, 1001, 1002, 1003, 1005]
    assert answers == [0, 1, 2, 3, 5]
    assert outcomes["dead"] == 1
    assert letter.error.startswith("IntegrityError")
    assert attempts == {*((n, 1) for n in range(6)), (2, 2), (2, 3), (4, 2), (4, 3)}


ENDINGS: dict[str, Callable[[Session], Any]] = {
    "commit": lambda session: session.commit(),
    "rollback": lambda session: session.rollback(),
    "close": lambda session: session.close(),
    "reset": lambda session: session.reset(),
    "invalidate": lambda session: session.invalidate(),
    "a block": lambda session: session.__enter__(),
    "the connection": lambda session: session.connection().commit(),
    "the transaction": lambda session: session.get_transaction().commit(),  # type: ignore[union-attr]
    "a text": lambda session: session.execute(sa.text("commit")),
    "a savepoint as text": lambda session: session.execute(sa.text("rollback to faregate")),
    "autocommit": lambda session: session.connection(execution_options={"isolation_level": "AUTOCOMMIT"}),
    "the driver": lambda session: session.connection().connection.driver_connection,
}


@pytest.mark.parametrize("how", ENDINGS)
async def test_a_session_cannot_end_the_transaction(store_url: str, kind: str, how: str) -> None:
    attempts: list[int] = []

    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        if how != "autocommit":  # SQLAlchemy has its own word on that, once there is a connection
            session.add(Note(n=asked.n))
            session.flush()
        if asked.n == 1:
            attempts.append(ctx.attempt)
            ENDINGS[how](session)
        session.merge(Note(n=asked.n))
        return Answered(n=asked.n)

    written, answers, outcomes, [letter] = await run(store_url, handler(kind, work), count=3)
    assert written == answers == [0, 2]
    assert outcomes["dead"] == 1
    assert letter.error.startswith("TransactionMisused"), letter.error
    assert max(attempts) <= 2  # the same again cannot help; only a batch without savepoints runs once more


async def test_a_block_of_begin_is_a_commit(store_url: str, kind: str) -> None:
    def work(asked: Asked, ctx: fg.Context, session: Session) -> None:
        with session.begin():
            session.add(Note(n=asked.n))

    written, _, _, [letter] = await run(store_url, handler(kind, work), count=1)
    assert written == []
    assert letter.error.startswith("TransactionMisused") and "begin_nested" in letter.error


async def test_leaving_a_session_by_async_with_is_refused_before_anything_is_lost() -> None:
    async def handle(asked: Asked, ctx: fg.AsyncContext) -> None:
        async with ctx.session as session:
            session.add(Note(n=asked.n))

    written, _, _, [letter] = await run("memory:", handle, count=1)
    assert written == []
    assert "must not close ctx.session" in letter.error


async def test_a_savepoint_of_the_session_takes_back_its_part_alone(either_way: str, kind: str) -> None:
    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        session.add(Note(n=asked.n))
        for part in (100, 200):
            try:
                with session.begin_nested():
                    session.add(Note(n=part + asked.n))
                    session.flush()
                    if part == 100:
                        session.execute(sa.insert(Note).values(n=asked.n))  # is there
            except IntegrityError:
                pass
        left_open = session.begin_nested()  # ends with the handler, as at a commit
        session.add(Note(n=300 + asked.n))
        assert left_open.is_active
        return Answered(n=asked.n)

    written, answers, _, _ = await run(either_way, handler(kind, work), count=3)
    assert written == [0, 1, 2, 200, 201, 202, 300, 301, 302]
    assert answers == [0, 1, 2]


async def test_who_goes_on_after_a_failed_flush_does_not_succeed_with_half_of_it(store_url: str, kind: str) -> None:
    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        session.add(Note(n=asked.n))
        session.flush()
        if asked.n == 1:
            session.expunge_all()
            session.add_all([Note(n=0, text="is there in any case"), Note(n=1)])
            with pytest.raises(IntegrityError):
                session.flush()
        return Answered(n=asked.n)

    written, answers, _, [letter] = await run(store_url, handler(kind, work), count=3)
    assert written == answers == [0, 2]
    assert letter.error.startswith("TransactionMisused")


async def test_every_try_has_a_session_of_its_own_on_one_engine(store_url: str, kind: str) -> None:
    sessions: list[Session] = []
    kept: list[Note] = []

    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        assert not session.new and not session.identity_map
        sessions.append(session)
        kept.append(note := Note(n=asked.n))
        session.add(note)
        session.flush()
        if ctx.attempt == 1:
            raise RuntimeError("the first try fails")
        return Answered(n=asked.n)

    written, *_ = await run(store_url, handler(kind, work), count=3)
    assert written == [0, 1, 2]
    assert len({id(session) for session in sessions}) == len(sessions) >= 6
    assert len({id(session.get_bind().dialect) for session in sessions}) == 1
    assert all(object_session(note) is None for note in kept)
    assert {note.n for note in kept} == {0, 1, 2}  # readable, as detached objects are


async def test_a_session_that_was_left_behind_writes_nothing(store_url: str) -> None:
    left: list[Any] = []

    async def handle(asked: Asked, ctx: fg.AsyncContext) -> None:
        await ctx.session.execute(sa.insert(Note).values(n=asked.n))
        left.append((ctx, ctx.session))

    written, *_ = await run(store_url, handle, count=1)
    assert written == [0]
    [(ctx, session)] = left
    with pytest.raises(fg.TryEnded):
        await session.execute(sa.insert(Note).values(n=77))
    with pytest.raises(fg.TryEnded):
        _ = ctx.session


async def test_a_task_that_is_left_at_a_statement_ends_with_the_try(store_url: str) -> None:
    ended: list[type[BaseException]] = []

    async def write_on(session: AsyncSession) -> None:
        try:
            while True:
                await session.execute(sa.select(Note.n))
                await asyncio.sleep(0)
        except BaseException as exc:
            ended.append(type(exc))

    tasks = []

    async def handle(asked: Asked, ctx: fg.AsyncContext) -> Answered:
        ctx.session.add(Note(n=asked.n))
        await ctx.session.flush()
        tasks.append(asyncio.create_task(write_on(ctx.session)))
        await rest()
        return Answered(n=asked.n)

    await run(store_url, handle, count=1)
    await asyncio.wait(tasks, timeout=LONG)
    assert len(ended) == 1


async def test_functions_of_one_try_see_the_same_objects(store_url: str) -> None:
    def handle(asked: Asked, ctx: fg.Context) -> list[Any]:
        ctx.session.add(Note(n=asked.n, text="by the handler"))
        return [Effect(asked.n), Answered(n=asked.n)]

    def prepare(node: fg.Node) -> None:
        @node.interprets(Effect)
        async def interpret(effect: Effect, ctx: fg.AsyncContext) -> None:
            [note] = [each for each in ctx.session.new if isinstance(each, Note)]
            assert note.text == "by the handler"
            ctx.session.add(Note(n=100 + effect.n))

        @node.use
        async def around(ctx: fg.AsyncContext, call_next: Any) -> None:
            ctx.session.add(Note(n=200 + ctx.message.n))
            await call_next()
            assert (await ctx.session.get(Note, ctx.message.n)).text == "by the handler"
            ctx.session.add(Note(n=300 + ctx.message.n))

    written, answers, *_ = await run(store_url, handle, count=2, prepare=prepare)
    assert written == [0, 1, 100, 101, 200, 201, 300, 301]
    assert answers == [0, 1]


async def test_what_a_middleware_has_pending_may_be_refused(store_url: str) -> None:
    def prepare(node: fg.Node) -> None:
        @node.use
        async def around(ctx: fg.AsyncContext, call_next: Any) -> None:
            await call_next()
            if ctx.message.n == 1:
                ctx.session.add(Note(n=1))

    def handle(asked: Asked, ctx: fg.Context) -> Answered:
        ctx.session.add(Note(n=asked.n))
        return Answered(n=asked.n)

    written, answers, _, [letter] = await run(store_url, handle, count=3, prepare=prepare)
    assert written == answers == [0, 2]
    assert letter.error.startswith("IntegrityError")


async def test_a_session_and_ctx_db_see_each_other(store_url: str, kind: str) -> None:
    def plain(asked: Asked, ctx: fg.BlockingContext) -> None:
        ctx.db.write("insert into notes(n) values (?)", (asked.n,))
        assert ctx.session.get(Note, asked.n) is not None
        ctx.session.add(Note(n=100 + asked.n))
        ctx.session.flush()
        assert ctx.db.fetchone("select n from notes where n = ?", (100 + asked.n,)) == (100 + asked.n,)

    async def awaited(asked: Asked, ctx: fg.AsyncContext) -> None:
        ctx.db.write("insert into notes(n) values (?)", (asked.n,))
        assert await ctx.session.get(Note, asked.n) is not None
        ctx.session.add(Note(n=100 + asked.n))
        await ctx.session.flush()
        assert await ctx.db.fetchone("select n from notes where n = ?", (100 + asked.n,)) == (100 + asked.n,)

    written, *_ = await run(store_url, plain if kind == "def" else awaited, count=2)
    assert written == [0, 1, 100, 101]


async def test_a_conflict_at_a_statement_of_the_session_is_that_of_the_store_and_tried_again(
    store_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conflicts, seen = [1], []
    for transaction in (SqliteTransaction, PostgresTransaction):
        plain = transaction.ask

        async def ask(self: Any, sql: str, parameters: Any, plain: Any = plain) -> Any:
            if conflicts and sql.lower().startswith("insert into notes"):
                conflicts.pop()
                raise StoreConflict("somebody else was faster")
            return await plain(self, sql, parameters)

        monkeypatch.setattr(transaction, "ask", ask)

    def work(asked: Asked, ctx: fg.Context, session: Session) -> Answered:
        session.add(Note(n=asked.n))
        try:
            session.flush()
        except Exception as exc:
            seen.append(type(exc))
            raise
        return Answered(n=asked.n)

    written, answers, outcomes, _ = await run(store_url, handler(kind, work), count=3)
    assert written == answers == [0, 1, 2]
    assert (outcomes["handled"], outcomes["dead"], seen) == (6, 0, [StoreConflict])


class Colour(enum.Enum):
    RED = "red"


things = sa.Table(
    "things",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(50)),
    sa.Column("at", sa.DateTime(timezone=True)),
    sa.Column("day", sa.Date),
    sa.Column("price", sa.Numeric(10, 2, asdecimal=True)),
    sa.Column("data", sa.JSON),
    sa.Column("uid", sa.Uuid),
    sa.Column("colour", sa.Enum(Colour, native_enum=False)),
    sa.Column("blob", sa.LargeBinary),
    sa.Column("a-b %(x)s", sa.Boolean),
)
THING = {
    "name": "50 % off?",
    "day": date(2026, 1, 2),
    "data": {"a": [1, None, "ä"]},
    "uid": uuid.UUID(int=7),
    "colour": Colour.RED,
    "blob": b"\0\xff",
    "a-b %(x)s": True,
}


@pytest.mark.filterwarnings("ignore:Dialect sqlite.* does .not. support Decimal")
async def test_core_and_its_types(store_url: str, kind: str) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def work(asked: Asked, ctx: fg.Context, session: Session) -> None:
        things.create(session.connection())
        first = session.execute(things.insert().values(**THING, at=moment, price=Decimal("1.25")))
        assert first.inserted_primary_key == (1,)
        row = session.execute(sa.select(things)).one()
        assert {name: row._mapping[name] for name in THING} == THING
        assert row.at.replace(tzinfo=UTC) == moment and row.price == Decimal("1.25")
        many = [{"name": str(n)} for n in range(30)]
        session.execute(things.insert(), many)
        ids = session.scalars(things.insert().returning(things.c.id), many).all()
        assert len(ids) == 30
        changed = session.execute(things.update().where(things.c.id > 1).values(name="x"))
        assert changed.rowcount == 60
        session.execute(things.update().where(things.c.id == sa.bindparam("b_id")), [{"b_id": 1, "name": "y"}] * 2)
        assert session.scalar(sa.text("select count(*) from things where name like '%x%' or name = :y"), {"y": "y"})
        assert session.connection().exec_driver_sql("select '50%'").scalar_one() == "50%"
        assert session.execute(sa.select(things.c.id).where(things.c.id == 0)).all() == []
        assert sorted(sa.inspect(session.connection()).get_table_names())[-1] == "things"

    _, _, outcomes, letters = await run(store_url, handler(kind, work), count=1)
    assert [letter.error for letter in letters] == []
    assert outcomes["handled"] == 1


async def test_a_node_without_a_store_has_no_session() -> None:
    node, failed = fg.Node("answering"), list[str]()

    @node.on(Asked, source="asking", retry=None, redeliver=None)
    async def handle(asked: Asked, ctx: fg.Context) -> None:
        try:
            _ = ctx.session
        except fg.ConfigurationError as exc:
            failed.append(str(exc))

    async with fg.Bus("memory:", nodes=[fg.Node("asking"), node]) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
    assert "has no store, so there is no ctx.session" in failed[0]


def test_a_store_of_another_kind_has_no_session() -> None:
    class Store:
        url = "toy:"

    class Work:
        node = "answering"

    with pytest.raises(fg.ConfigurationError, match=r"has no ctx\.session: use ctx\.db"):
        open_session(None, Work(), Store(), 0)  # type: ignore[arg-type]


class Repository:
    def __init__(self, session: AsyncSession) -> None:
        self.session = session


@pytest.mark.parametrize("raw", [False, True])
async def test_a_session_of_a_provider_is_new_for_each_try(either_way: str, raw: bool) -> None:
    attempts: set[tuple[int, int]] = set()

    def prepare(node: fg.Node) -> None:
        @node.provides
        async def repository(ctx: fg.AsyncContext) -> AsyncIterator[Repository]:
            yield Repository(ctx.session)

    async def handle(asked: Asked, ctx: fg.AsyncContext, repository: Repository) -> Answered:
        attempts.add((asked.n, ctx.attempt))
        repository.session.add(Note(n=asked.n))
        if asked.n % 2:
            await repository.session.flush()
        if raw:
            assert ctx.db.raw is not None
        if ctx.attempt == 1 and asked.n in (1, 2):
            raise RuntimeError("the first try fails")
        if asked.n == 4:
            repository.session.add(Note(n=4))
            ctx.session.add(Note(n=400))
        return Answered(n=asked.n)

    written, answers, outcomes, [letter] = await run(either_way, handle, prepare=prepare)
    assert written == answers == [0, 1, 2, 3, 5]
    assert outcomes["dead"] == 1
    assert letter.error.startswith("IntegrityError") or "FlushError" in letter.error
    assert {(1, 2), (2, 2), (4, 2), (4, 3)} <= attempts


async def test_a_middleware_that_runs_the_handler_again_has_a_new_session(store_url: str) -> None:
    refused: list[BaseException] = []

    def prepare(node: fg.Node) -> None:
        @node.use
        async def twice(ctx: fg.AsyncContext, call_next: Any) -> None:
            first = ctx.session
            first.add(Note(n=100 + ctx.message.n))
            await first.flush()
            await call_next()
            await call_next()
            try:
                await first.execute(sa.insert(Note).values(n=200))
            except fg.TryEnded as exc:
                refused.append(exc)
            assert await ctx.session.get(Note, ctx.message.n) is not None
            ctx.session.add(Note(n=300 + ctx.message.n))

    def handle(asked: Asked, ctx: fg.BlockingContext) -> Answered:
        ctx.session.add(Note(n=asked.n))
        return Answered(n=asked.n)

    written, answers, *_ = await run(store_url, handle, count=1, prepare=prepare)
    assert (written, answers, len(refused)) == ([0, 300], [0], 1)


def test_the_refusal_says_what_to_do() -> None:
    from faregate.stores.sql.sessions.connection import not_yours

    with pytest.raises(TransactionMisused, match=r"begin_nested\(\), which rolls back that part alone"):
        not_yours("commit")
