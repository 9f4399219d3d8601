-- The statements of the PostgreSQL store. Each has a name and a purpose. Several rows go as arrays, in one statement.
-- Rows of a table that may be long are looked up one by one (`lateral … limit 1`, which the planner cannot turn into a
-- join) and changed so: while there are no statistics it takes all of a node for a few rows, and reads it each time.

-- name: record
-- Insert ledger rows in the order of their ids (or two batches could lock each other); the new ids if some were there.
with inserted as (
    insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome, sent, sent_ids)
    select %s, given.*
    from unnest(%s::uuid[], %s::bytea[], %s::text[], %s::bigint[], %s::float8[], %s::text[], %s::int[], %s::bytea[])
        as given (message_id, digest, key, position, handled_at, outcome, sent, sent_ids)
    order by given.message_id
    on conflict do nothing
    returning message_id
)
select coalesce(array_agg(message_id::text), '{}') from inserted having count(*) < %s;

-- name: note_sent
-- Keep what the handler of a message sent.
update faregate_ledger set sent = %s, sent_ids = %s::bytea where node = %s and message_id = %s::uuid;

-- name: recorded
-- The digests of some handled messages.
select given.id::text, found.digest from unnest(%(ids)s::uuid[]) as given (id) cross join lateral (
    select digest from faregate_ledger where node = %(node)s and message_id = given.id limit 1
) as found;

-- name: unrecord
-- Take ledger rows out again.
delete from faregate_ledger where ctid = any(array(
    select found.place from unnest(%(ids)s::uuid[]) as given (id) cross join lateral (
        select ctid as place from faregate_ledger where node = %(node)s and message_id = given.id limit 1
    ) as found
));

-- name: send
-- Insert outbox rows in the given order.
insert into faregate_outbox (node, message_id, ordinal, destination, key, envelope)
select node, message_id, ordinal, destination, key, envelope
from unnest(%s::text[], %s::uuid[], %s::int[], %s::text[], %s::text[], %s::bytea[])
    with ordinality as given (node, message_id, ordinal, destination, key, envelope, place)
order by place
returning seq;

-- name: send_attempts
-- Insert outbox rows in the given order, with what is known of their attempts.
insert into faregate_outbox
    (node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at)
select node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at
from unnest(%s::text[], %s::uuid[], %s::int[], %s::text[], %s::text[], %s::bytea[], %s::text[], %s::text[],
            %s::float8[], %s::int[], %s::float8[])
    with ordinality as given (node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after,
                              version, dispatched_at, place)
order by place
returning seq;

-- name: dispatched
-- Remove outbox rows.
delete from faregate_outbox where seq = any(%s::bigint[]);

-- name: revise
-- Change what the versions that were read of outbox rows send, and tell which were those; they stay in their place.
update faregate_outbox as waiting set envelope = given.envelope, chosen = given.chosen, version = waiting.version + 1
from unnest(%s::bigint[], %s::integer[], %s::bytea[], %s::text[]) as given (seq, version, envelope, chosen)
where waiting.seq = given.seq and waiting.version = given.version
returning waiting.seq;

-- name: undispatched
-- Outbox rows that are not dispatched, in order.
select seq, node, message_id::text, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at
from faregate_outbox
where dispatched_at is null and (%(nodes)s::text[] is null or node = any(%(nodes)s::text[]))
order by seq limit %(limit)s;

-- name: keyed_before
-- What is not dispatched of keys, up to a seq.
select seq, destination, key from faregate_outbox
where seq < %(seq)s::bigint and key is not null and dispatched_at is null
    and (%(nodes)s::text is null or node in (select json_array_elements_text(%(nodes)s::json)))
order by seq;

-- name: send_from_outside
-- Insert an outbox row, unless its node is none that a bus has run here.
insert into faregate_outbox (node, ordinal, destination, key, envelope)
select %s::text, %s::int, %s::text, %s::text, %s::bytea
where exists (select from faregate_nodes where node = %s) or not exists (select from faregate_nodes);

-- name: schedule_from_outside
-- The same for what is due later, unless it waits or was cancelled.
insert into faregate_scheduled (node, publication_id, name, due_at, ordinal, destination, key, envelope)
select %s::text, %s::text, %s::text, %s::float8, %s::int, %s::text, %s::text, %s::bytea
where exists (select from faregate_nodes where node = %s) or not exists (select from faregate_nodes)
on conflict do nothing;

-- name: cancel_scheduled
-- Cancel what waits, by its id or by its name.
update faregate_scheduled set cancelled = true
where node = %s and not cancelled and (publication_id = %s or name = %s);

-- name: take_due
-- Remove what is due, but for what another transaction is about to take. The order of the answer means nothing.
delete from faregate_scheduled where seq = any(array(
    select seq from faregate_scheduled
    where not cancelled and due_at <= %(now)s
        and (%(nodes)s::text is null or node in (select json_array_elements_text(%(nodes)s::json)))
        and publication_id not in (select json_array_elements_text(%(but)s::json))
    order by due_at, seq limit %(limit)s for update skip locked
))
returning due_at, seq, node, message_id::text, ordinal, destination, key, envelope;

-- name: take_scheduled
-- Remove one publication that waits.
delete from faregate_scheduled where not cancelled and publication_id = %s
returning due_at, seq, node, message_id::text, ordinal, destination, key, envelope;

-- name: next_due
-- When the first of what waits is due.
select due_at from faregate_scheduled
where not cancelled and (%(nodes)s::text is null or node in (select json_array_elements_text(%(nodes)s::json)))
order by due_at limit 1;

-- name: scheduled
-- What waits, in the order of its time.
select node, message_id::text, ordinal, destination, key, envelope from faregate_scheduled
where not cancelled and (%(nodes)s::text is null or node in (select json_array_elements_text(%(nodes)s::json)))
order by due_at, seq limit %(limit)s;

-- name: count_scheduled
-- How much waits.
select count(*) from faregate_scheduled
where not cancelled and (%(nodes)s::text is null or node in (select json_array_elements_text(%(nodes)s::json)));

-- name: keep_dispatched
-- Outbox rows that are dispatched, and stay.
update faregate_outbox set dispatched_at = %s where seq = any(%s::bigint[]) and dispatched_at is null;

-- name: register_attempts
-- Add to the registered attempts of the version that was read.
update faregate_outbox
set registered = (coalesce(registered, '[]')::jsonb || %s::jsonb)::text, not_after = %s, version = version + 1
where seq = %s and version = %s;

-- name: add_dead
-- Insert a dead letter, or fold it into the one that is there; a discarded one only counts.
insert into faregate_dead as dead
    (node, message_id, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope)
values (%s, %s::uuid, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
on conflict (node, message_id) do update set
    copies = dead.copies + 1,
    reason = case when dead.status = 'discarded' then dead.reason else excluded.reason end,
    error = case when dead.status = 'discarded' then dead.error else excluded.error end,
    tries = case when dead.status = 'discarded' then dead.tries else excluded.tries end,
    redeliveries = case when dead.status = 'discarded' then dead.redeliveries else excluded.redeliveries end,
    last_failed_at = case when dead.status = 'discarded' then dead.last_failed_at else excluded.last_failed_at end,
    envelope = case when dead.status = 'discarded' then dead.envelope else excluded.envelope end,
    status = case when dead.status = 'discarded' then dead.status else 'open' end
returning node, message_id::text, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope;

-- name: resolve
-- Dead letters whose messages were handled after all.
update faregate_dead set status = 'resolved', changed_at = %s
where node = %s and message_id = any(%s::uuid[]) and status <> 'resolved';

-- name: set_dead_status
-- Set the status of a dead letter that waits for a decision.
update faregate_dead
set status = %(status)s, replays = replays + (%(status)s::text = 'replayed')::int, changed_by = %(by)s, changed_at = %(at)s
where node = %(node)s and message_id = %(message_id)s::uuid and status in ('open', 'replayed')
returning node, message_id::text, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope;

-- name: dead
-- Dead letters that fit a filter, oldest last failure first.
select node, message_id::text, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope
from faregate_dead
where (%(node)s::text is null or node = %(node)s) and (%(type)s::text is null or type = %(type)s)
    and (%(reason)s::text is null or reason = %(reason)s) and (%(status)s::text is null or status = %(status)s)
    and (%(message_id)s::uuid is null or message_id = %(message_id)s::uuid)
    and (%(since)s::float8 is null or last_failed_at >= %(since)s)
    and (%(before)s::float8 is null or greatest(last_failed_at, changed_at) < %(before)s)
order by last_failed_at, node, message_id limit %(limit)s;

-- name: known
-- Those of some messages that were handled or are dead.
select given.id::text, 'handled', found.digest, 0 from unnest(%(ids)s::uuid[]) as given (id) cross join lateral (
    select digest from faregate_ledger where node = %(node)s and message_id = given.id limit 1
) as found
union all
select message_id::text, case status when 'discarded' then status else 'dead' end, null, replays from faregate_dead
where node = %(node)s and message_id = any(%(ids)s::uuid[]) and status in ('open', 'replayed', 'discarded');

-- name: evict
-- Remove old ledger rows whose outputs are all dispatched, and keys as old; raise the floor if any went. How many rows.
with gone as (
    delete from faregate_ledger where ctid = any(array(
        select ctid from faregate_ledger as old
        where node = %(node)s and handled_at < %(before)s and not exists (
            select from faregate_outbox as waiting
            where waiting.node = old.node and waiting.message_id = old.message_id and waiting.dispatched_at is null
        )
        order by handled_at limit %(limit)s
    )) returning 1
), keys_gone as (
    delete from faregate_identities where ctid = any(array(
        select ctid from faregate_identities where node = %(node)s and claimed_at < %(before)s limit %(limit)s
    )) returning 1
), cancelled_gone as (
    delete from faregate_scheduled where node = %(node)s and cancelled and due_at < %(before)s
), raised as (
    insert into faregate_floor (node, floor)
    select %(node)s, %(before)s where exists (select from gone) or exists (select from keys_gone)
    on conflict (node) do update set floor = greatest(faregate_floor.floor, excluded.floor)
)
select count(*) from gone;

-- name: lock_buckets
-- Hold some buckets of keys until the transaction ends. The class keeps our locks apart from everybody else's.
select pg_advisory_xact_lock(1180791397, number) from unnest(%s::int[]) as number;

-- name: positions
-- The last positions of some keys.
select given.key, found.position from unnest(%(keys)s::text[]) as given (key) cross join lateral (
    select position from faregate_positions where node = %(node)s and handler = %(handler)s and key = given.key limit 1
) as found;

-- name: advance
-- Raise the positions of some keys; they never sink.
insert into faregate_positions (node, handler, key, position)
select %s::text, %s::text, given.key, given.position from unnest(%s::text[], %s::bigint[]) as given (key, position)
on conflict (node, handler, key) do update set position = greatest(faregate_positions.position, excluded.position);

-- name: unpark
-- Remove parked messages, those that were read.
delete from faregate_parked p using unnest(%s::uuid[], %s::bigint[]) as read(message_id, position)
where p.node = %s and p.message_id = read.message_id and p.position = read.position;

-- name: parked_with
-- Parked messages with one of some ids or keys.
select message_id::text, due_at, tries, key, position, envelope, queue, starts from faregate_parked
where node = %s and (message_id = any(%s::uuid[]) or key = any(%s::text[]));

-- name: park_next
-- Park a message behind those of its queue and key, unless it is parked.
insert into faregate_parked (node, message_id, due_at, tries, key, position, envelope, queue, starts)
values (%s, %s::uuid, %s, %s, %s, greatest((1000000 * extract(epoch from clock_timestamp())::float8)::bigint, 1 + coalesce((
    select max(position) from faregate_parked where node = %s and queue = %s and key = %s
), 0)), %s, %s, %s) on conflict do nothing;

-- name: due_parked
-- Parked messages that are due and that an instance may try: of its partitions, and those that nobody else has claimed.
select message_id::text, due_at, tries, key, position, envelope, queue, starts from faregate_parked
where node = %(node)s and due_at <= %(due)s::float8 and (
    queue in (select json_array_elements_text(%(queues)s::json))
    or (queue is null and (
        claimed_until is null or claimed_until <= extract(epoch from clock_timestamp())::float8 or claimed_by = %(owner)s
    ))
)
order by position limit %(limit)s for update skip locked;

-- name: keep_claimed
-- What an instance has claimed is its own for a while. Others pass over what is locked, and so does this: the rows that
-- handlers end just now are locked in an order of their own, and waiting for them would be a deadlock.
update faregate_parked set claimed_until = extract(epoch from clock_timestamp())::float8 + %(seconds)s::float8
where node = %(node)s and message_id in (
    select message_id from faregate_parked where node = %(node)s and claimed_by = %(owner)s for update skip locked
);

-- name: claim_lease
-- Take a lease that nobody has; its epoch. The lock waits for every commit under the lease, which a plain update does not.
with fresh as (
    insert into faregate_leases (node, queue, owner, epoch, until)
    values (%(node)s, %(queue)s, %(owner)s, 1, extract(epoch from clock_timestamp())::float8 + %(seconds)s::float8)
    on conflict do nothing returning epoch
), free as (
    select node, queue from faregate_leases
    where node = %(node)s and queue = %(queue)s
        and (until <= extract(epoch from clock_timestamp())::float8 or (owner is null and wanted_by = %(owner)s))
    for update
), taken as (
    update faregate_leases as lease
    set owner = %(owner)s, epoch = lease.epoch + 1, until = extract(epoch from clock_timestamp())::float8 + %(seconds)s::float8, wanted_by = null
    from free where lease.node = free.node and lease.queue = free.queue returning lease.epoch
)
select epoch from fresh union all select epoch from taken;

-- name: renew_leases
-- Hold leases for longer; which of them. It does not wait for commits under them.
update faregate_leases set until = extract(epoch from clock_timestamp())::float8 + %(seconds)s::float8
where node = %(node)s and owner = %(owner)s and (queue, epoch) in (
    select pair ->> 0, (pair ->> 1)::bigint from json_array_elements(%(held)s::json) as pair
) returning queue;

-- name: release_lease
-- Let a lease go: to who wanted it, or to anybody.
update faregate_leases
set owner = null, until = case when wanted_by is null then 0 else extract(epoch from clock_timestamp())::float8 + %(seconds)s::float8 end
where node = %(node)s and queue = %(queue)s and owner = %(owner)s and epoch = %(epoch)s;

-- name: leases
-- Leases of some partitions.
select node, queue, owner, epoch, until - extract(epoch from clock_timestamp())::float8, wanted_by from faregate_leases
where node = %(node)s and queue in (select json_array_elements_text(%(queues)s::json)) order by queue;

-- name: hold_lease
-- Whether a lease is still held under an epoch. Who takes it over waits for the end of this transaction.
select 1 from faregate_leases where node = %s and queue = %s and epoch = %s and owner is not null for key share;

-- name: create_tokens
-- Create tokens that are absent and in time by the clock of the server.
insert into faregate_tokens (attempt_id, message_id, recipient, producer, created_at, not_after, payload_ref, claim_id)
select given.*
from unnest(%s::text[], %s::uuid[], %s::text[], %s::text[], %s::float8[], %s::float8[], %s::text[], %s::text[])
    as given (attempt_id, message_id, recipient, producer, created_at, not_after, payload_ref, claim_id)
where extract(epoch from clock_timestamp()) < given.not_after
order by given.attempt_id
on conflict do nothing;

-- name: discard_tokens
-- Remove tokens whoever holds them, locked in order (or two could lock each other); those that were there.
with locked as (
    select attempt_id from faregate_tokens where attempt_id = any(%s::text[]) order by attempt_id for update
)
delete from faregate_tokens using locked where faregate_tokens.attempt_id = locked.attempt_id
returning faregate_tokens.attempt_id;

-- name: now
-- The clock of the server.
select extract(epoch from clock_timestamp())::float8;

-- name: recipients
-- The recipient lists of some topics.
select topic, version, modes from faregate_topics where topic = any(%s::text[]);

-- name: lock_migrations
-- One process at a time brings the tables of a schema up to date.
select pg_advisory_lock(hashtext('faregate_migrations'), hashtext(current_schema()));

-- name: lock_schema
-- One process at a time applies a node's schema: `create … if not exists` of two at once fails in one of them.
select pg_advisory_lock(hashtext('faregate_schema'));

-- name: unlock_schema
-- The next one may.
select pg_advisory_unlock(hashtext('faregate_schema'));

-- name: has_migrations
-- Whether Faregate's tables are here at all.
select to_regclass('faregate_migrations') is not null;

-- name: create_migrations
-- The table that tells which migrations this database has seen.
create table if not exists faregate_migrations (
    version integer primary key,
    name text not null,
    applied_at double precision not null
);

-- name: our_tables
-- Which of our tables are here.
select tablename::text from pg_tables where schemaname = current_schema() and starts_with(tablename, 'faregate_')
order by tablename;

-- name: read_ledger
-- All ledger rows, with the transaction that wrote each: those of a later one are higher.
select node, message_id, key, position, handled_at, outcome, -age(xmin)::bigint, digest, sent, sent_ids
from faregate_ledger;

-- name: read_uncounted_ledger
-- The same where an older version has set the ledger up.
select node, message_id, key, position, handled_at, outcome, -age(xmin)::bigint, digest, null, null
from faregate_ledger;

-- name: read_unroutable
-- Outgoing messages that nobody takes: their ids are those of publications.
select node, envelope from faregate_dead where message_id::text = publication_id;
