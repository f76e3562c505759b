"""The twist: potential and effective potential, the networks, contrastive twist learning, the pool."""
