"""The study files that ship, in `shipped/`, and what they name: methods at a budget, splits, toy problems."""
