"""Motion: one inbox, one TaskGroup. Tasks start only here."""
