-- The first tables. Released migrations never change; schema.sql explains the tables.

-- The messages that were handled. The rowid grows with time, so inserts go to the end of the table.
create table faregate_ledger (
    seq integer primary key,
    node text not null,
    message_id blob not null,
    digest blob,
    key text,
    position integer,
    handled_at real not null,
    outcome text not null
);
create unique index faregate_ledger_once on faregate_ledger (node, message_id);

-- Outgoing messages. A seq is never used again, so a repeated removal cannot hit another row.
create table faregate_outbox (
    seq integer primary key autoincrement,
    node text not null,
    message_id blob,
    ordinal integer not null,
    destination text not null,
    key text,
    envelope blob not null,
    registered text,
    chosen text,
    not_after real,
    version integer not null default 0,
    dispatched_at real
);

-- Business keys that a handler has seen.
create table faregate_identities (
    node text not null,
    handler text not null,
    identity text not null,
    claimed_at real not null,
    primary key (node, handler, identity)
);

-- Dead letters.
create table faregate_dead (
    node text not null,
    message_id blob not null,
    publication_id text not null,
    type text not null,
    source text not null,
    correlation_id text not null,
    key text,
    queue text not null,
    reason text not null,
    error text not null,
    tries integer not null,
    redeliveries integer not null,
    first_failed_at real not null,
    last_failed_at real not null,
    copies integer not null,
    replays integer not null,
    status text not null,
    changed_by text,
    changed_at real,
    envelope blob not null,
    primary key (node, message_id)
);
create index faregate_dead_by_time on faregate_dead (last_failed_at);

-- Up to when ledger rows were removed.
create table faregate_floor (
    node text primary key,
    floor real not null
) without rowid;

-- Mode tokens: a node's claims on incoming messages.
create table faregate_claims (
    node text not null,
    message_id blob not null,
    claim_id text not null,
    attempt_id text not null,
    state text not null check (state in ('NEW', 'DONE')),
    created_at real not null,
    primary key (node, message_id)
) without rowid;

-- Mode tokens: the tokens, where this database is the token store.
create table faregate_tokens (
    attempt_id text primary key,
    message_id blob not null,
    recipient text not null,
    producer text not null,
    payload_ref text,
    claim_id text,
    created_at real not null,
    not_after real not null
) without rowid;

-- Recipient lists: modes is a JSON object of node to mode.
create table faregate_topics (
    topic text primary key,
    version integer not null,
    modes text not null
) without rowid;

-- Messages that a log engine tries again later.
create table faregate_parked (
    node text not null,
    message_id blob not null,
    due_at real not null,
    tries integer not null,
    key text,
    position integer,
    envelope blob not null,
    primary key (node, message_id)
) without rowid;
create index faregate_parked_by_time on faregate_parked (node, due_at);

-- The last position that a log engine committed, per key.
create table faregate_positions (
    node text not null,
    handler text not null,
    key text not null,
    position integer not null,
    primary key (node, handler, key)
) without rowid;
