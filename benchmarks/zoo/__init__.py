"""Programs that others wrote, fitted with the group as client, beside NUTS on all rows."""
