-- Scheduled messages wait in the store of their sender.

-- Outgoing messages that are due later: they leave for the outbox, or are cancelled. What was cancelled stays for a while.
create table faregate_scheduled (
    seq bigint generated always as identity primary key,
    node text not null,
    publication_id text not null,
    name text,
    due_at double precision not null,
    cancelled boolean not null default false,
    message_id uuid,
    ordinal integer not null,
    destination text not null,
    key text,
    envelope bytea not null,
    unique (publication_id, node)
);
create index faregate_scheduled_by_time on faregate_scheduled (due_at) where not cancelled;
create index faregate_scheduled_by_name on faregate_scheduled (node, name) where name is not null;
