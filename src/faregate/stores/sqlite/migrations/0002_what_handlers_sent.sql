-- What the handler of each message sent: how many messages, and their publication ids combined by exclusive or. Null in
-- rows from before: nobody counted then.

alter table faregate_ledger add column sent integer;
alter table faregate_ledger add column sent_ids blob;
