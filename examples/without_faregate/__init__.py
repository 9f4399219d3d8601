"""Programs that know nothing of Faregate, before and behind a node that does."""
