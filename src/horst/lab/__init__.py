"""What experiments need and a user's program does not: models, data, the training loop, the paper's tables, reports."""
