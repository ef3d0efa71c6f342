"""What every room needs and which knows nothing of them: nested tensors, keyed noise, devices, memory, importance weights."""
