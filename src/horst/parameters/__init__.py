"""What a model's parameters are, and where their entries lie when several ranks share them."""
