-- The statements that are the same on every SQL store. Each has a name and a purpose.

-- name: schema_version
-- The version of the schema of this database.
select coalesce(max(version), 0) from faregate_migrations;

-- name: floors
-- Up to when ledger rows were removed, per node.
select node, floor from faregate_floor order by node;

-- name: low_water
-- The positions that belong to no handler.
select node, key, position from faregate_positions where handler = '';

-- name: ledger_nodes
-- The nodes that have a ledger row; it jumps from one to the next in the index.
with recursive n(node) as (
    select min(node) from faregate_ledger
    union all
    select (select min(node) from faregate_ledger l where l.node > n.node) from n where n.node is not null
)
select node from n where node is not null;

-- name: identities_nodes
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
