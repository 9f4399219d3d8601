-- Several instances of a node: who consumes which partition, and who tries which parked message again.

alter table faregate_parked add column queue text;
alter table faregate_parked add column starts integer not null default 0;
alter table faregate_parked add column claimed_by text;
alter table faregate_parked add column claimed_until double precision;
create index faregate_parked_by_key on faregate_parked (node, queue, key, position);

-- Which instance consumes which partition of an ordered subscription, under which epoch and until when.
create table faregate_leases (
    node text not null,
    queue text not null,
    owner text,
    epoch bigint not null,
    until double precision not null,
    wanted_by text,
    primary key (node, queue)
);
