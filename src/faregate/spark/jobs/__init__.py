"""Jobs on the log and the stores: audit, rates, drain, replay."""
