"""What a fitted formula says: effects, contrasts, profiles of clients, survival curves, R2."""
