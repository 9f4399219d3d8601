-- The first tables. Released migrations never change; schema.sql explains the tables.

-- The messages that were handled. Retention goes by time, and the rows lie in its order: a block range index is next to
-- free and enough.
create table faregate_ledger (
    node text not null,
    message_id uuid not null,
    digest bytea,
    key text,
    position bigint,
    handled_at double precision not null,
    outcome text not null,
    primary key (node, message_id)
);
create index faregate_ledger_by_time on faregate_ledger using brin (handled_at);

-- Outgoing messages. A seq is never used again, so a repeated removal cannot hit another row.
create table faregate_outbox (
    seq bigint generated always as identity primary key,
    node text not null,
    message_id uuid,
    ordinal integer not null,
    destination text not null,
    key text,
    envelope bytea not null,
    registered text,
    chosen text,
    not_after double precision,
    version integer not null default 0,
    dispatched_at double precision
);

-- Business keys that a handler has seen.
create table faregate_identities (
    node text not null,
    handler text not null,
    identity text not null,
    claimed_at double precision not null,
    primary key (node, handler, identity)
);

-- Dead letters.
create table faregate_dead (
    node text not null,
    message_id uuid not null,
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
    first_failed_at double precision not null,
    last_failed_at double precision not null,
    copies integer not null,
    replays integer not null,
    status text not null,
    changed_by text,
    changed_at double precision,
    envelope bytea not null,
    primary key (node, message_id)
);
create index faregate_dead_by_time on faregate_dead (last_failed_at);

-- Up to when ledger rows were removed.
create table faregate_floor (
    node text primary key,
    floor double precision not null
);

-- Mode tokens: a node's claims on incoming messages.
create table faregate_claims (
    node text not null,
    message_id uuid not null,
    claim_id text not null,
    attempt_id text not null,
    state text not null check (state in ('NEW', 'DONE')),
    created_at double precision not null,
    primary key (node, message_id)
);

-- Mode tokens: the tokens, where this database is the token store.
create table faregate_tokens (
    attempt_id text primary key,
    message_id uuid not null,
    recipient text not null,
    producer text not null,
    payload_ref text,
    claim_id text,
    created_at double precision not null,
    not_after double precision not null
);

-- Recipient lists: modes is a JSON object of node to mode.
create table faregate_topics (
    topic text primary key,
    version integer not null,
    modes text not null
);

-- Messages that a log engine tries again later.
create table faregate_parked (
    node text not null,
    message_id uuid not null,
    due_at double precision not null,
    tries integer not null,
    key text,
    position bigint,
    envelope bytea not null,
    primary key (node, message_id)
);
create index faregate_parked_by_time on faregate_parked (node, due_at);

-- The last position that a log engine committed, per key.
create table faregate_positions (
    node text not null,
    handler text not null,
    key text not null,
    position bigint not null,
    primary key (node, handler, key)
);
