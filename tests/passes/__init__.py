"""Recorded backward passes and scripts, compared with eager."""
