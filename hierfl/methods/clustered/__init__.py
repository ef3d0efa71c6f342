"""Methods that fit one model for each kind of client."""
