"""Methods that fit one model for all clients, by averages."""
