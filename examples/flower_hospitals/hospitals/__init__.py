"""A hierarchy over four hospitals whose patients stay where they are."""
