"""The pooled learner and its parts: adapter, surrogate, pool, texts held out, forced draws."""
