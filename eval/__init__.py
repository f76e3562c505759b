"""What the samples are measured with: a toxicity classifier, a sentence encoder, and the estimates built on them."""
