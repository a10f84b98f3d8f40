"""Loaded training steps, beside eager."""
