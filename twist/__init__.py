"""The twist: potentials, networks, contrastive twist learning, the pool."""
