-- The tables of Faregate in a SQLite database: what all migrations together make. For reading, and for a test that
-- compares; a database is set up by the migrations alone. Message ids are 16 bytes, times are seconds since the epoch.

-- The messages that were handled, and what their handlers sent: how many messages, and their publication ids combined
-- by exclusive or (null: nobody counted). The rowid grows with time, so inserts go to the end of the table.
create table faregate_ledger (
    seq integer primary key,
    node text not null,
    message_id blob not null,
    digest blob,
    key text,
    position integer,
    handled_at real not null,
    outcome text not null,
    sent integer,
    sent_ids blob
);
create unique index faregate_ledger_once on faregate_ledger (node, message_id);
create index faregate_ledger_by_time on faregate_ledger (node, handled_at);

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

-- Outgoing messages that are due later: they leave for the outbox, or are cancelled. What was cancelled stays for a while.
create table faregate_scheduled (
    seq integer primary key autoincrement,
    node text not null,
    publication_id text not null,
    name text,
    due_at real not null,
    cancelled integer not null default 0,
    message_id blob,
    ordinal integer not null,
    destination text not null,
    key text,
    envelope blob not null,
    unique (publication_id, node)
);
create index faregate_scheduled_by_time on faregate_scheduled (due_at) where cancelled = 0;
create index faregate_scheduled_by_name on faregate_scheduled (node, name) where name is not null;

-- Business keys that a handler has seen.
create table faregate_identities (
    node text not null,
    handler text not null,
    identity text not null,
    claimed_at real not null,
    primary key (node, handler, identity)
);
create index faregate_identities_by_time on faregate_identities (node, claimed_at);

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

-- Messages that are tried again later; whose turn it is to try, and how often a handler was about to begin.
create table faregate_parked (
    node text not null,
    message_id blob not null,
    due_at real not null,
    tries integer not null,
    key text,
    position integer,
    envelope blob not null,
    queue text,
    starts integer not null default 0,
    claimed_by text,
    claimed_until real,
    primary key (node, message_id)
) without rowid;
create index faregate_parked_by_time on faregate_parked (node, due_at);
create index faregate_parked_by_key on faregate_parked (node, queue, key, position);

-- The last position that a log engine committed, per key.
create table faregate_positions (
    node text not null,
    handler text not null,
    key text not null,
    position integer not null,
    primary key (node, handler, key)
) without rowid;

-- Which instance consumes which partition of an ordered subscription, under which epoch and until when.
create table faregate_leases (
    node text not null,
    queue text not null,
    owner text,
    epoch integer not null,
    until real not null,
    wanted_by text,
    primary key (node, queue)
) without rowid;

-- The current generation of an ordered subscription's partitions, and how many they are.
create table faregate_generations (
    node text not null,
    queue text not null,
    generation integer not null,
    partitions integer not null,
    primary key (node, queue)
) without rowid;

-- The nodes that a bus has run on this database, and when it last started.
create table faregate_nodes (
    node text primary key,
    started_at real not null
) without rowid;

-- Which migrations this database has seen.
create table faregate_migrations (
    version integer primary key,
    name text not null,
    applied_at real not null
);
