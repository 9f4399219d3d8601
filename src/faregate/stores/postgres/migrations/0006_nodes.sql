-- Whose the outbox is: a row of a node that nobody has ever run is a mistake.

-- The nodes that a bus has run on this database, and when it last started.
create table faregate_nodes (
    node text primary key,
    started_at double precision not null
);
