"""From a finished run to draws, predictions and importance weights."""
