-- The statements that are the same on every SQL store. Each has a name and a purpose. Parameters are question marks.

-- name: schema_version
-- The version of the schema of this database.
select coalesce(max(version), 0) from faregate_migrations;

-- name: floors
-- Up to when ledger rows were removed, per node.
select node, floor from faregate_floor order by node;

-- name: low_water
-- The positions that belong to no handler.
select node, key, position from faregate_positions where handler = '';

-- name: take_business_key
-- Take a business key unless it is taken.
insert into faregate_identities (node, handler, identity, claimed_at) values (?, ?, ?, ?) on conflict do nothing;

-- name: free_business_key
-- A business key may be taken again.
delete from faregate_identities where node = ? and handler = ? and identity = ?;

-- name: has_business_key
-- Whether a business key is taken.
select 1 from faregate_identities where node = ? and handler = ? and identity = ?;

-- name: outbox_row
-- One outbox row.
select seq, node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at
from faregate_outbox where seq = ?;

-- name: outbox_rows_of
-- The undispatched outputs of one message.
select seq, node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at
from faregate_outbox where node = ? and message_id = ? and dispatched_at is null order by seq;

-- name: dispatched_rows
-- Outbox rows that are dispatched and stay for their stray attempts.
select seq, node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at
from faregate_outbox where dispatched_at is not null order by seq limit ?;

-- name: schedule
-- Keep an outgoing message until it is due, unless it waits or was cancelled.
insert into faregate_scheduled (node, publication_id, name, due_at, message_id, ordinal, destination, key, envelope)
values (?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict do nothing;

-- name: known_nodes
-- The nodes that a bus has run on this database.
select node from faregate_nodes order by node;

-- name: note_node
-- A bus runs this node.
insert into faregate_nodes (node, started_at) values (?, ?)
on conflict (node) do update set started_at = excluded.started_at;

-- name: unsent
-- What is not dispatched: how many rows each node has, and the first of them.
select node, count(*), min(seq) from faregate_outbox where dispatched_at is null group by node;

-- name: choose_attempts
-- Set the chosen attempts of the version that was read.
update faregate_outbox set chosen = ?, version = version + 1 where seq = ? and version = ?;

-- name: fold
-- Count another copy of a dead letter.
update faregate_dead set copies = copies + 1 where node = ? and message_id = ?;

-- name: remove_dead
-- Remove a dead letter that is still as it was read.
delete from faregate_dead
where node = ? and message_id = ? and status = ? and copies = ? and replays = ? and last_failed_at = ?;

-- name: floor
-- Up to when ledger rows were removed.
select floor from faregate_floor where node = ?;

-- name: insert_claim
-- Record a claim unless there is one.
insert into faregate_claims (node, message_id, claim_id, attempt_id, state, created_at)
values (?, ?, ?, ?, 'NEW', ?) on conflict do nothing;

-- name: finish_claim
-- The effects of a claimed message are in this transaction.
update faregate_claims set state = 'DONE' where node = ? and message_id = ? and claim_id = ? and state = 'NEW';

-- name: delete_claim
-- Remove a claim, or only one whose effects are not committed.
delete from faregate_claims where node = ? and message_id = ? and claim_id = ? and (state = 'NEW' or not ?);

-- name: claim_record
-- The claim on one message.
select node, message_id, claim_id, attempt_id, state, created_at from faregate_claims where node = ? and message_id = ?;

-- name: claim_records
-- Old claims, oldest first.
select node, message_id, claim_id, attempt_id, state, created_at from faregate_claims
where created_at < ? order by created_at, node, message_id limit ?;

-- name: done_claims
-- The claims of a node whose effects are committed.
select node, message_id, claim_id, attempt_id, state, created_at from faregate_claims where node = ? and state = 'DONE';

-- name: read_token
-- One token.
select attempt_id, message_id, recipient, producer, created_at, not_after, payload_ref, claim_id
from faregate_tokens where attempt_id = ?;

-- name: claim_token
-- Set the claim of a token that has none, or this one already.
update faregate_tokens set claim_id = ? where attempt_id = ? and (claim_id is null or claim_id = ?);

-- name: delete_token
-- Remove a token that this claim holds.
delete from faregate_tokens where attempt_id = ? and claim_id = ?;

-- name: count_tokens
-- How many tokens there are.
select count(*) from faregate_tokens;

-- name: insert_topic
-- The first recipient list of a topic.
insert into faregate_topics (topic, version, modes) values (?, 1, ?) on conflict do nothing;

-- name: swap_topic
-- Replace the recipient list of the version that was read.
update faregate_topics set version = version + 1, modes = ? where topic = ? and version = ?;

-- name: note_migration
-- Note that a migration was applied.
insert into faregate_migrations (version, name, applied_at) values (?, ?, ?);

-- name: park
-- Park a message that comes from the log, unless it is parked.
insert into faregate_parked (node, message_id, due_at, tries, key, position, envelope, queue, starts)
values (?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict do nothing;

-- name: park_again
-- Park a message that was parked, from the row that was read.
update faregate_parked set due_at = ?, tries = ?, key = ?, claimed_by = null, claimed_until = null
where node = ? and message_id = ? and tries = ?;

-- name: parked
-- Parked messages that are due, in the order of the log.
select message_id, due_at, tries, key, position, envelope, queue, starts from faregate_parked
where node = ? and due_at <= ? order by position limit ?;

-- name: claim_parked
-- An instance tries it again.
update faregate_parked set claimed_by = ? where node = ? and message_id = ?;

-- name: count_start
-- A handler is about to begin on a parked message, or has not begun after all; how many starts it has then.
update faregate_parked set starts = starts + ? where node = ? and message_id = ? returning starts;

-- name: next_of_key
-- The first of a key has nobody before it any more.
update faregate_parked set due_at = ? where node = ? and queue = ? and key = ? and due_at = 253402300799 and position = (
    select min(position) from faregate_parked where node = ? and queue = ? and key = ?
);

-- name: first_of_key
-- The first parked message of a key.
select message_id, due_at, tries, key, position, envelope, queue, starts from faregate_parked
where node = ? and queue = ? and key = ? order by position limit 1;

-- name: count_keys
-- How many messages of each key are parked in a partition.
select key, count(*) from faregate_parked where node = ? and queue = ? and key is not null group by key;

-- name: generation
-- The current generation of a subscription's partitions, and how many they are.
select generation, partitions from faregate_generations where node = ? and queue = ?;

-- name: note_generation
-- Note the first generation of a subscription that has none.
insert into faregate_generations (node, queue, generation, partitions) values (?, ?, 1, ?) on conflict do nothing;

-- name: next_generation
-- Go on to the next generation, unless somebody did.
update faregate_generations set generation = generation + 1, partitions = ?
where node = ? and queue = ? and generation = ?;

-- name: ask_for_lease
-- Ask the owner of a lease to let go, unless somebody did.
update faregate_leases set wanted_by = ?
where node = ? and queue = ? and epoch = ? and owner is not null and wanted_by is null;

-- name: any_parked
-- Whether anything is parked.
select 1 from faregate_parked where node = ? limit 1;

-- name: count_parked
-- How many messages are parked, and the first position of them.
select count(*), min(position) from faregate_parked where node = ?;

-- name: ledger_nodes
-- The nodes that have a ledger row; it jumps from one to the next in the index.
with recursive n(node) as (
    select min(node) from faregate_ledger
    union all
    select (select min(node) from faregate_ledger l where l.node > n.node) from n where n.node is not null
)
select node from n where node is not null;

-- name: business_keys_nodes
-- The same for business keys.
with recursive n(node) as (
    select min(node) from faregate_identities
    union all
    select (select min(node) from faregate_identities l where l.node > n.node) from n where n.node is not null
)
select node from n where node is not null;

-- name: read_dead
-- All dead letters.
select node, message_id, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope
from faregate_dead;

-- name: read_dead_states
-- What became of each dead letter.
select node, message_id, last_failed_at, status from faregate_dead;

-- name: read_parked
-- All parked messages.
select node, message_id, due_at, tries, key, position from faregate_parked;

-- name: read_outbox
-- All outgoing messages.
select seq, node, message_id, ordinal, destination, key, dispatched_at from faregate_outbox order by seq;

-- name: read_waiting
-- What handlers sent and what is not dispatched.
select node, envelope from faregate_outbox where dispatched_at is null and message_id is not null;

-- name: read_scheduled
-- What handlers sent and what is not due, or was cancelled.
select node, envelope from faregate_scheduled where message_id is not null;
