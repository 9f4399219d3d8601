-- Scheduled messages wait in the store of their sender.

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
