"""Other people's methods, one short file each, and the contenders that experiments compare by name."""
