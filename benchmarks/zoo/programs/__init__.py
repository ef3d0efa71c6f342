"""One program a file: its source, its rows and the model."""
