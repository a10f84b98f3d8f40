"""Loaded training steps, compared with eager."""
