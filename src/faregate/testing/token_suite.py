"""What every token store promises, as named cases; used like `queue_suite`:

    @pytest.mark.parametrize("name", TOKEN_CASES)
    async def test_memory(name):
        await run_token_case(name, memory_token_subject)

A case raises AssertionError when the promise is broken.
"""

import asyncio

from faregate.ports.tokens import NOBODY, Recipients, Token
from faregate.testing.cases import Cases, run_case
from faregate.testing.store_subjects import MakeTokens, TokenSubject
from faregate.testing.store_suite.rows import ids

TOKEN_CASES = Cases[TokenSubject]()
case = TOKEN_CASES.add


async def run_token_case(name: str, make: MakeTokens) -> None:
    """Run one case against a fresh subject."""
    await run_case(TOKEN_CASES[name], make)


async def fresh(subject: TokenSubject, *attempts: str, life: float = 3600.0) -> list[Token]:
    now = await subject.store.now()
    return [Token(attempt, ids(1)[0], "shipping", "billing", now, now + life, "ref") for attempt in attempts]


# --- tokens -----------------------------------------------------------------------------------------------


@case
async def a_token_comes_back_as_it_was(subject: TokenSubject) -> None:
    [token] = await fresh(subject, "a1")
    await subject.store.create([token])
    assert await subject.store.read("a1") == token
    assert await subject.other.read("a1") == token, "another user does not see it"
    assert await subject.store.read("a2") is None


@case
async def creating_a_token_again_changes_nothing(subject: TokenSubject) -> None:
    [token, new] = await fresh(subject, "a1", "a2")
    await subject.store.create([token])
    await subject.store.claim("a1", "c1")
    await subject.other.create([token._replace(recipient="other"), new])
    assert await subject.store.read("a1") == token._replace(claim_id="c1"), "a token was created over another"
    assert await subject.store.read("a2") == new, "its neighbour was not created"


@case
async def a_token_is_not_created_after_its_time(subject: TokenSubject) -> None:
    [in_time] = await fresh(subject, "a1")
    [late] = await fresh(subject, "a2", life=-1.0)
    await subject.store.create([late, in_time])
    assert await subject.store.read("a2") is None, "a late packet created a token"
    assert await subject.store.read("a1") is not None, "its neighbour was not created"


@case
async def a_claim_is_set_once(subject: TokenSubject) -> None:
    await subject.store.create(await fresh(subject, "a1", "a2"))
    assert await subject.store.claim("a1", "c1") == "claimed"
    assert await subject.other.claim("a1", "c1") == "claimed", "the same claim again"
    assert await subject.other.claim("a1", "c2") == "taken"
    assert await subject.store.claim("a3", "c1") == "missing"
    [claimed, unclaimed] = [await subject.store.read(attempt) for attempt in ("a1", "a2")]
    assert claimed is not None and claimed.claim_id == "c1", f"the claim is {claimed}"
    assert unclaimed is not None and unclaimed.claim_id is None, "another token was claimed too"


@case
async def of_many_that_claim_at_once_one_wins(subject: TokenSubject) -> None:
    await subject.store.create(await fresh(subject, "a1"))
    users = [subject.store, subject.other] * 4
    results = await asyncio.gather(*(user.claim("a1", f"c{number}") for number, user in enumerate(users)))
    assert sorted(results) == ["claimed", *["taken"] * 7], f"{results}"
    token = await subject.store.read("a1")
    assert token is not None and token.claim_id == f"c{results.index('claimed')}", (
        "another one than the winner holds it"
    )


@case
async def a_token_is_deleted_only_by_its_claim(subject: TokenSubject) -> None:
    await subject.store.create(await fresh(subject, "a1", "a2"))
    await subject.store.claim("a1", "c1")
    await subject.store.delete("a1", "c2")
    await subject.store.delete("a2", "c1")
    assert await subject.store.count() == 2, "a token was deleted by a claim that does not hold it"
    for _ in range(2):
        await subject.store.delete("a1", "c1")
    assert await subject.other.read("a1") is None
    assert await subject.store.claim("a1", "c1") == "missing"


@case
async def tokens_are_discarded_whoever_holds_them(subject: TokenSubject) -> None:
    await subject.store.create(await fresh(subject, "a1", "a2", "a3"))
    await subject.store.claim("a1", "c1")
    await subject.store.discard(["a2", "unknown", "a1"])
    await subject.store.discard([])
    assert [await subject.store.read(attempt) is None for attempt in ("a1", "a2", "a3")] == [True, True, False]


@case
async def tokens_are_counted(subject: TokenSubject) -> None:
    assert await subject.store.count() == 0
    await subject.store.create(await fresh(subject, "a1", "a2"))
    assert await subject.other.count() == 2


@case
async def the_same_database_has_one_identity(subject: TokenSubject) -> None:
    assert subject.store.database_id == subject.other.database_id


# --- recipient lists --------------------------------------------------------------------------------------


@case
async def a_topic_without_a_list_has_nobody(subject: TokenSubject) -> None:
    assert await subject.store.recipients(["a", "b"]) == {"a": NOBODY, "b": NOBODY}
    assert await subject.store.recipients([]) == {}


@case
async def a_list_is_replaced_only_from_the_version_that_was_read(subject: TokenSubject) -> None:
    assert await subject.store.swap("a", 0, {"billing": "tokens"})
    assert not await subject.other.swap("a", 0, {"shipping": "ledger"}), "replaced from version 0 twice"
    assert await subject.other.swap("a", 1, {"billing": "tokens", "shipping": "ledger"})
    assert not await subject.store.swap("a", 1, {}), "replaced from an old version"
    assert not await subject.store.swap("b", 3, {}), "replaced a list that is not there"
    found = await subject.store.recipients(["b", "a"])
    assert found == {"a": Recipients(2, {"billing": "tokens", "shipping": "ledger"}), "b": NOBODY}, f"{found}"


@case
async def of_many_that_replace_a_list_at_once_one_wins(subject: TokenSubject) -> None:
    for version in (0, 1):
        users = [subject.store, subject.other] * 3
        swaps = [user.swap("a", version, {f"n{number}": "tokens"}) for number, user in enumerate(users)]
        results = await asyncio.gather(*swaps)
        assert results.count(True) == 1, f"{results.count(True)} have replaced version {version}"
        found = (await subject.store.recipients(["a"]))["a"]
        assert found == Recipients(version + 1, {f"n{results.index(True)}": "tokens"}), f"{found}"
