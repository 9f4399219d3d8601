-- What is old is found by an index, however long the ledger is (docs/decisions/0056).

drop index faregate_ledger_by_time;
create index faregate_ledger_by_time on faregate_ledger (node, handled_at);
create index faregate_identities_by_time on faregate_identities (node, claimed_at);
