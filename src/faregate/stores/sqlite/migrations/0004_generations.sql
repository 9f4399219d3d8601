-- Partitions whose number may change: which they are now.

-- The current generation of an ordered subscription's partitions, and how many they are.
create table faregate_generations (
    node text not null,
    queue text not null,
    generation integer not null,
    partitions integer not null,
    primary key (node, queue)
) without rowid;
