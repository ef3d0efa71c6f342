"""The study files that ship, in `shipped/`, and what they name: methods, splits, toy problems."""
