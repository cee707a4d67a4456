"""Decisions: questions about a text, answered with probabilities of labels."""
