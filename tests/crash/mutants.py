MUTANTS: dict = {}
