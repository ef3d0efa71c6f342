"""The demo `hierfl demo`: from the rows of four hospitals to a report."""
