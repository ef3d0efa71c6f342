"""Methods that infer a posterior of the global sites."""
