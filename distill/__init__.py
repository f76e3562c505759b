"""The learners of Algorithm 1, and the pairs (p^(m), psi^(m)) that they learn."""
