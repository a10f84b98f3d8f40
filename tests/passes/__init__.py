"""Recorded backward passes and scripts, beside eager."""
