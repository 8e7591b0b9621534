"""The soak takes an hour: `make soak` runs it, and pytest collects nothing here."""

collect_ignore_glob = ["*"]
