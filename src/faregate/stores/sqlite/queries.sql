-- The statements of the SQLite store. Each has a name and a purpose.

-- name: record
-- Insert a ledger row unless the message was handled.
insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome, sent, sent_ids)
values (?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict do nothing;

-- name: record_unsent
-- The same while the handler has sent nothing.
insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome, sent)
values (?, ?, ?, ?, ?, ?, ?, 0) on conflict do nothing;

-- name: note_sent
-- Keep what a message's handler sent.
update faregate_ledger set sent = ?, sent_ids = ? where node = ? and message_id = ?;

-- name: note_sent_at
-- The same, by where its row is.
update faregate_ledger set sent = ?, sent_ids = ? where seq = ?;

-- name: note_sent_range
-- The same for rows that lie together, and whose handlers sent equally many: their ids stand one behind the other.
update faregate_ledger set sent = ?1, sent_ids = substr(?2, (seq - ?3) * 16 + 1, 16) where seq between ?3 and ?4;

-- name: recorded
-- One ledger row's place and digest.
select seq, digest from faregate_ledger where node = ? and message_id = ?;

-- name: unrecord
-- Take a ledger row out again.
delete from faregate_ledger where node = ? and message_id = ?;

-- name: last_rowid
-- The rowid of this connection's last insert.
select last_insert_rowid();

-- name: send
-- Insert an outbox row.
insert into faregate_outbox (node, message_id, ordinal, destination, key, envelope) values (?, ?, ?, ?, ?, ?);

-- name: send_attempts
-- Insert an outbox row, with what is known of its attempts.
insert into faregate_outbox
    (node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: revise
-- Change what the version that was read of an outbox row sends; it stays in its place.
update faregate_outbox set envelope = ?, chosen = ?, version = version + 1 where seq = ? and version = ?;

-- name: dispatched
-- Remove one outbox row.
delete from faregate_outbox where seq = ?;

-- name: dispatched_range
-- Remove outbox rows that lie together.
delete from faregate_outbox where seq between ? and ?;

-- name: undispatched
-- Outbox rows that are not dispatched, in order.
select seq, node, message_id, ordinal, destination, key, envelope, registered, chosen, not_after, version, dispatched_at
from faregate_outbox
where dispatched_at is null and (:nodes is null or node in (select value from json_each(:nodes)))
order by seq limit :limit;

-- name: keyed_before
-- What is not dispatched of keys, up to a seq.
select seq, destination, key from faregate_outbox
where seq < :seq and key is not null and dispatched_at is null
    and (:nodes is null or node in (select value from json_each(:nodes)))
order by seq;

-- name: send_from_outside
-- Insert an outbox row, unless its node is none that a bus has run here.
insert into faregate_outbox (node, ordinal, destination, key, envelope)
select ?, ?, ?, ?, ?
where exists (select 1 from faregate_nodes where node = ?) or not exists (select 1 from faregate_nodes);

-- name: schedule_from_outside
-- The same for what is due later, unless it waits or was cancelled.
insert into faregate_scheduled (node, publication_id, name, due_at, ordinal, destination, key, envelope)
select ?, ?, ?, ?, ?, ?, ?, ?
where exists (select 1 from faregate_nodes where node = ?) or not exists (select 1 from faregate_nodes)
on conflict do nothing;

-- name: cancel_scheduled
-- Cancel what waits, by its id or by its name.
update faregate_scheduled set cancelled = 1
where node = ? and cancelled = 0 and (publication_id = ? or name = ?);

-- name: take_due
-- Remove what is due. The order of the answer means nothing.
delete from faregate_scheduled where seq in (
    select seq from faregate_scheduled
    where cancelled = 0 and due_at <= :now and (:nodes is null or node in (select value from json_each(:nodes)))
        and publication_id not in (select value from json_each(:but))
    order by due_at, seq limit :limit
)
returning due_at, seq, node, message_id, ordinal, destination, key, envelope;

-- name: take_scheduled
-- Remove one publication that waits.
delete from faregate_scheduled where cancelled = 0 and publication_id = ?
returning due_at, seq, node, message_id, ordinal, destination, key, envelope;

-- name: next_due
-- When the first of what waits is due.
select due_at from faregate_scheduled
where cancelled = 0 and (:nodes is null or node in (select value from json_each(:nodes)))
order by due_at limit 1;

-- name: scheduled
-- What waits, in the order of its time.
select node, message_id, ordinal, destination, key, envelope from faregate_scheduled
where cancelled = 0 and (:nodes is null or node in (select value from json_each(:nodes)))
order by due_at, seq limit :limit;

-- name: count_scheduled
-- How much waits.
select count(*) from faregate_scheduled
where cancelled = 0 and (:nodes is null or node in (select value from json_each(:nodes)));

-- name: evict_cancelled
-- Forget what was cancelled, and would have been due long ago.
delete from faregate_scheduled where node = ? and cancelled = 1 and due_at < ?;

-- name: keep_dispatched
-- An outbox row that is dispatched, and stays.
update faregate_outbox set dispatched_at = ? where seq = ? and dispatched_at is null;

-- name: register_attempts
-- Add to the registered attempts of the version that was read.
update faregate_outbox
set registered = (
    select json_group_array(value) from (
        select value from json_each(coalesce(registered, '[]')) union all select value from json_each(?)
    )
), not_after = ?, version = version + 1
where seq = ? and version = ?;

-- name: add_dead
-- Insert a dead letter, or fold it into the one that is there; a discarded one only counts.
insert into faregate_dead
    (node, message_id, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
     first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
on conflict (node, message_id) do update set
    copies = copies + 1,
    reason = iif(status = 'discarded', reason, excluded.reason),
    error = iif(status = 'discarded', error, excluded.error),
    tries = iif(status = 'discarded', tries, excluded.tries),
    redeliveries = iif(status = 'discarded', redeliveries, excluded.redeliveries),
    last_failed_at = iif(status = 'discarded', last_failed_at, excluded.last_failed_at),
    envelope = iif(status = 'discarded', envelope, excluded.envelope),
    status = iif(status = 'discarded', status, 'open')
returning node, message_id, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope;

-- name: resolve
-- Dead letters whose messages were handled after all; the list of ids is filled in.
update faregate_dead set status = 'resolved', changed_at = ?
where node = ? and message_id in (/*values*/) and status <> 'resolved';

-- name: set_dead_status
-- Set the status of a dead letter that waits for a decision.
update faregate_dead set status = :status, replays = replays + (:status = 'replayed'), changed_by = :by, changed_at = :at
where node = :node and message_id = :message_id and status in ('open', 'replayed')
returning node, message_id, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope;

-- name: dead
-- Dead letters that fit a filter, oldest last failure first.
select node, message_id, publication_id, type, source, correlation_id, key, queue, reason, error, tries, redeliveries,
    first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope
from faregate_dead
where (:node is null or node = :node) and (:type is null or type = :type) and (:reason is null or reason = :reason)
    and (:status is null or status = :status) and (:message_id is null or message_id = :message_id)
    and (:since is null or last_failed_at >= :since)
    and (:before is null or max(last_failed_at, coalesce(changed_at, last_failed_at)) < :before)
order by last_failed_at, node, message_id limit :limit;

-- name: known_handled
-- Those of some messages that were handled; the list of ids is filled in.
select message_id, digest from faregate_ledger where node = ? and message_id in (/*values*/);

-- name: any_dead
-- Whether a node has dead letters.
select 1 from faregate_dead where node = ? limit 1;

-- name: known_dead
-- Those of some messages that are dead; the list of ids is filled in.
select message_id, iif(status = 'discarded', 'discarded', 'dead'), replays from faregate_dead
where node = ? and message_id in (/*values*/) and status in ('open', 'replayed', 'discarded');

-- name: evict
-- Remove old ledger rows whose outputs are all dispatched.
delete from faregate_ledger where seq in (
    select seq from faregate_ledger indexed by faregate_ledger_by_time
    where node = :node and handled_at < :before and message_id not in (
        select message_id from faregate_outbox
        where node = :node and message_id is not null and dispatched_at is null
    )
    order by handled_at limit :limit
);

-- name: evict_business_keys
-- Remove business keys that are as old.
delete from faregate_identities where rowid in (
    select rowid from faregate_identities indexed by faregate_identities_by_time
    where node = :node and claimed_at < :before
    limit :limit
);

-- name: raise_floor
-- Raise the floor of a node; it never sinks.
insert into faregate_floor (node, floor) values (?, ?)
on conflict (node) do update set floor = max(floor, excluded.floor);

-- name: positions
-- The last positions of some keys; the list of keys is filled in.
select key, position from faregate_positions where node = ? and handler = ? and key in (/*values*/);

-- name: advance
-- Raise the position of a key; it never sinks.
insert into faregate_positions (node, handler, key, position) values (?, ?, ?, ?)
on conflict (node, handler, key) do update set position = max(position, excluded.position);

-- name: unpark
-- Remove a parked message, if it is the one that was read.
delete from faregate_parked where node = ? and message_id = ? and position = ?;

-- name: parked_ids
-- Those of some messages that are parked; the list of ids is filled in.
select message_id, due_at, tries, key, position, envelope, queue, starts from faregate_parked
where node = ? and message_id in (/*values*/);

-- name: parked_keys
-- Parked messages of some keys; the list of keys is filled in.
select message_id, due_at, tries, key, position, envelope, queue, starts from faregate_parked where node = ? and key in (/*values*/);

-- name: park_next
-- Park a message behind those of its queue and key, unless it is parked.
insert into faregate_parked (node, message_id, due_at, tries, key, position, envelope, queue, starts)
values (?, ?, ?, ?, ?, max(?, 1 + coalesce((
    select max(position) from faregate_parked where node = ? and queue = ? and key = ?
), 0)), ?, ?, ?) on conflict do nothing;

-- name: due_parked
-- Parked messages that are due and that an instance may try: of its partitions, and those that nobody else has claimed.
select message_id, due_at, tries, key, position, envelope, queue, starts from faregate_parked
where node = :node and due_at <= :due and (
    queue in (select value from json_each(:queues))
    or (queue is null and (claimed_until is null or claimed_until <= :now or claimed_by = :owner))
)
order by position limit :limit;

-- name: keep_claimed
-- What an instance has claimed is its own for a while.
update faregate_parked set claimed_until = :now + :seconds where node = :node and claimed_by = :owner;

-- name: claim_lease
-- Take a lease that nobody has; its epoch.
insert into faregate_leases (node, queue, owner, epoch, until) values (:node, :queue, :owner, 1, :now + :seconds)
on conflict (node, queue) do update set owner = excluded.owner, epoch = epoch + 1, until = excluded.until, wanted_by = null
where until <= :now or (owner is null and wanted_by = :owner)
returning epoch;

-- name: renew_leases
-- Hold leases for longer; which of them.
update faregate_leases set until = :now + :seconds where node = :node and owner = :owner and (queue, epoch) in (
    select json_extract(value, '$[0]'), json_extract(value, '$[1]') from json_each(:held)
) returning queue;

-- name: release_lease
-- Let a lease go: to who wanted it, or to anybody.
update faregate_leases set owner = null, until = case when wanted_by is null then 0 else :now + :seconds end
where node = :node and queue = :queue and owner = :owner and epoch = :epoch;

-- name: leases
-- Leases of some partitions.
select node, queue, owner, epoch, until - :now, wanted_by from faregate_leases
where node = :node and queue in (select value from json_each(:queues)) order by queue;

-- name: hold_lease
-- Whether a lease is still held under an epoch. The writer's lock keeps it so.
select 1 from faregate_leases where node = ? and queue = ? and epoch = ? and owner is not null;

-- name: create_token
-- Create a token that is absent.
insert into faregate_tokens (attempt_id, message_id, recipient, producer, created_at, not_after, payload_ref, claim_id)
values (?, ?, ?, ?, ?, ?, ?, ?) on conflict do nothing;

-- name: discard_token
-- Remove a token whoever holds it.
delete from faregate_tokens where attempt_id = ?;

-- name: recipients
-- The recipient list of a topic.
select version, modes from faregate_topics where topic = ?;

-- name: has_migrations
-- Whether Faregate's tables are here at all.
select 1 from sqlite_master where type = 'table' and name = 'faregate_migrations';

-- name: create_migrations
-- The table that tells which migrations this database has seen.
create table if not exists faregate_migrations (
    version integer primary key,
    name text not null,
    applied_at real not null
);

-- name: our_tables
-- Which of our tables are here.
select name from sqlite_master where type = 'table' and substr(name, 1, 9) = 'faregate_' order by name;

-- name: ledger_span
-- The first and the last number of a ledger row; asked for together, SQLite reads every row.
select (select min(seq) from faregate_ledger), (select max(seq) from faregate_ledger);

-- name: read_ledger
-- Ledger rows between two numbers.
select node, message_id, key, position, handled_at, outcome, seq, digest, sent, sent_ids
from faregate_ledger where seq between ? and ?;

-- name: read_uncounted_ledger
-- The same where an older version has set the ledger up.
select node, message_id, key, position, handled_at, outcome, seq, digest, null, null
from faregate_ledger where seq between ? and ?;

-- name: read_unroutable
-- Outgoing messages that nobody takes: their ids are those of publications.
select node, envelope from faregate_dead where lower(hex(message_id)) = replace(publication_id, '-', '');
