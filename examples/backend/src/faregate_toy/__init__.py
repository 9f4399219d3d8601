"""`toy-store:PATH` and `toy-queue:`, for `fg.Bus` to find by their entry points."""
