"""Data sets: token files, images, and Appendix D's sparse linear classification with its max-margin solutions."""
