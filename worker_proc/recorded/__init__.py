"""A start without torch and transformers, from what an earlier start of the same model found out."""
